-- mark_worker_dead: remove a worker from the registry. Its leases are left to expire, or to be revoked.
--
-- Called by operators.
-- Roles    operate
-- Locks    the registration, and waits for it.
-- Returns  marked, or not_registered.
create or replace function flowfabric.mark_worker_dead(p_namespace text, p_instance text, p_reason text) returns text
language sql volatile security definer as $$
    select flowfabric.drop_registration(p_namespace, p_instance, null, p_reason)
$$;

-- drop_registration: the same; p_process: only if this process registered it; null: whichever.
create or replace function flowfabric.drop_registration(
    p_namespace text, p_instance text, p_process uuid, p_reason text) returns text
language plpgsql as $$
declare
    v_now timestamptz;
    r flowfabric.registration;
begin
    perform flowfabric.require_read_committed();
    select x.* into r from flowfabric.registration x
    where x.namespace = p_namespace and x.worker_instance_id = p_instance for update;
    v_now := flowfabric.now();
    if not found or not flowfabric.is_alive(r, v_now) or r.process is distinct from coalesce(p_process, r.process) then
        return 'not_registered';
    end if;
    delete from flowfabric.registration x where x.namespace = p_namespace and x.worker_instance_id = p_instance;
    perform flowfabric.log_worker(r, 'marked_dead', p_reason, v_now);
    perform flowfabric.judge_lanes(r.lanes);
    return 'marked';
end;
$$;
