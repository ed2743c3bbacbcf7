-- act: apply the action of a kind of timer to executions that are locked and due.
create or replace function flowfabric.act(p_kind text, p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    case p_kind
        when 'lease' then perform flowfabric.mark_expired(p_partition, p_id, p_now);
        when 'attempt' then perform flowfabric.time_out_attempts(p_partition, p_id, p_now);
        when 'deadline' then perform flowfabric.pass_deadlines(p_partition, p_id, p_now);
        when 'delay' then perform flowfabric.end_delays(p_partition, p_id, p_now);
        when 'parked' then perform flowfabric.promote(p_partition, p_id, p_now);
        when 'suspension' then perform flowfabric.expire_suspensions(p_partition, p_id, p_now);
        when 'waitpoint' then perform flowfabric.expire_waitpoints(p_partition, p_id, p_now);
        when 'retention' then perform flowfabric.purge(p_partition, p_id, p_now);
    end case;
end;
$$;

-- end_delays: the action of delays: executions that changed code stopped open for every worker, others become claimable.
create or replace function flowfabric.end_delays(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[]; v_stopped_partitions integer[]; v_stopped_ids uuid[];
begin
    select array_agg(e.partition) filter (where e.stop_route is null), array_agg(e.id) filter (where e.stop_route is null),
           array_agg(e.partition) filter (where e.stop_route is not null),
           array_agg(e.id) filter (where e.stop_route is not null)
    into v_partitions, v_ids, v_stopped_partitions, v_stopped_ids
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    if v_ids is not null then
        perform flowfabric.promote(v_partitions, v_ids, p_now);
    end if;
    if v_stopped_ids is not null then
        perform flowfabric.open_stopped(v_stopped_partitions, v_stopped_ids, p_now);
    end if;
end;
$$;
