-- act: apply the action of a kind of timer to executions that are locked and due.
create or replace function flowfabric.act(p_kind text, p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    case p_kind
        when 'lease' then perform flowfabric.mark_expired(p_partition, p_id, p_now);
        when 'attempt' then perform flowfabric.time_out_attempts(p_partition, p_id, p_now);
        when 'deadline' then perform flowfabric.pass_deadlines(p_partition, p_id, p_now);
        when 'delay', 'parked' then perform flowfabric.promote(p_partition, p_id, p_now);
        when 'suspension' then perform flowfabric.expire_suspensions(p_partition, p_id, p_now);
        when 'waitpoint' then perform flowfabric.expire_waitpoints(p_partition, p_id, p_now);
        when 'retention' then perform flowfabric.purge(p_partition, p_id, p_now);
    end case;
end;
$$;
