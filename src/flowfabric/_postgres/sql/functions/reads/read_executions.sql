-- Reads see committed state and take no lock that a writer waits for.

-- read_executions: executions as readers see them; no row for an unknown id.
--
-- Returns  the id of a lease only to operators (may_operate).
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_executions(p_partition integer[], p_id uuid[])
returns setof flowfabric.execution_view
language plpgsql stable security definer as $$
declare
    v_may_operate boolean := flowfabric.may_operate();
    v_row flowfabric.execution_view;
begin
    for v_row in
        select v.* from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution_view v on v.partition = u.partition and v.id = u.id
    loop
        if not v_may_operate then
            v_row.lease_id := null;
        end if;
        return next v_row;
    end loop;
end;
$$;
