-- list_attempts: the attempts of one execution, in order.
--
-- p_after  only later ones than the attempt with this index. p_limit: at most this many; null: all.
-- Returns  the ids of leases only to operators (may_operate).
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_attempts(p_partition integer, p_id uuid, p_after integer, p_limit integer)
returns setof flowfabric.attempt
language plpgsql stable security definer as $$
declare
    v_sees boolean := flowfabric.may_operate();
    v_row flowfabric.attempt;
begin
    for v_row in
        (select a.* from flowfabric.attempt a
         where a.partition = p_partition and a.id = p_id and a.attempt_index > p_after
         order by a.attempt_index limit p_limit)
        union all
        (select (flowfabric.latest_attempt(e, w)).*
         from flowfabric.execution e left join flowfabric.worker w on w.id = e.worker
         where e.partition = p_partition and e.id = p_id and e.attempts > 0 and e.attempt_index > p_after)
        order by attempt_index limit p_limit
    loop
        if not v_sees then
            v_row.lease_id := null;
        end if;
        return next v_row;
    end loop;
end;
$$;
