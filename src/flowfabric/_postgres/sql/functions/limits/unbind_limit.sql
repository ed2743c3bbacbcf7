-- unbind_limit: remove a binding; existing executions keep their limits
--
-- Returns  whether it existed.
-- Roles    operate
create or replace function flowfabric.unbind_limit(
    p_limit uuid, p_lane text, p_kind text, p_namespace text, p_tag text, p_value text, p_flow_kind text)
returns boolean
language plpgsql security definer as $$
declare
    v_found boolean;
begin
    perform flowfabric.require_read_committed();
    delete from flowfabric.limit_binding b
    where b.id = flowfabric.binding_id(p_limit, p_lane, p_kind, p_namespace, p_tag, p_value, p_flow_kind);
    v_found := found;
    perform flowfabric.free_routes();
    return v_found;
end;
$$;
