-- list_attempts: every attempt of one execution, in order.
--
-- Returns  the ids of leases only to operators (may_operate).
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_attempts(p_partition integer, p_id uuid)
returns setof flowfabric.attempt
language plpgsql stable security definer as $$
declare
    v_sees boolean := flowfabric.may_operate();
    v_row flowfabric.attempt;
begin
    for v_row in select a.* from flowfabric.attempts_of(p_partition, p_id) a order by a.attempt_index loop
        if not v_sees then
            v_row.lease_id := null;
        end if;
        return next v_row;
    end loop;
end;
$$;
