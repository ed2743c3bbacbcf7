-- Reads see committed state and take no lock that a writer waits for.

-- read_execution: one execution as readers see it; no row for an unknown id.
--
-- Returns  the id of a lease only to operators (may_operate).
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_execution(p_partition integer, p_id uuid)
returns setof flowfabric.execution_view
language plpgsql stable security definer as $$
declare
    v_row flowfabric.execution_view;
begin
    select v.* into v_row from flowfabric.execution_view v where v.partition = p_partition and v.id = p_id;
    if found then
        if not flowfabric.may_operate() then
            v_row.lease_id := null;
        end if;
        return next v_row;
    end if;
end;
$$;
