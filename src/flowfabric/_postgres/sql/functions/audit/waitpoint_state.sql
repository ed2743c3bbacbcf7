-- audit_waitpoint_state: The stored facts of a waitpoint agree with its state, and its execution exists.
create or replace function flowfabric.audit_waitpoint_state(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'waitpoint_state', w.partition, w.id, w.waitpoint_id || ' ' || w.state
    from flowfabric.waitpoint w left join flowfabric.execution x on x.partition = w.partition and x.id = w.id
    where (w.partition, w.id) between (p_low, p_from) and (p_high, p_to) and not coalesce(case w.state
        when 'pending' then x.completed_at is null and x.has_waitpoints and w.suspension_id is null and w.closed_at is null
             and w.attempt_index = x.attempt_index and w.expires_at is not null
        when 'active' then exists (select from flowfabric.suspension s where s.partition = w.partition and s.id = w.id
                                   and s.closed_at is null and w.waitpoint_id = any (s.waitpoint_ids))
        when 'closed' then w.closed_at is not null and w.close_reason <> ''
        when 'expired' then w.closed_at is not null and w.close_reason = 'never_committed' and w.suspension_id is null
        end and x.id is not null, false)
$$;
