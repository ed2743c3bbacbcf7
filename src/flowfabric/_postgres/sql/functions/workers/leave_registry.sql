-- leave_registry: a worker that stops removes itself from the registry
--
-- Roles    work, operate
-- Takes    p_process: the process that registered it.
-- Locks    the registration, and waits for it.
-- Returns  marked, or not_registered.
create or replace function flowfabric.leave_registry(
    p_namespace text, p_instance text, p_process uuid, p_reason text) returns text
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    return case when p_process is null then 'not_registered'
                else flowfabric.drop_registration(p_namespace, p_instance, p_process, p_reason) end;
end;
$$;
