-- heartbeat_worker: a worker says that it is still there
--
-- Called by workers, in a statement with another call where they make one. It never revives: a worker that was marked
-- dead, swept or silent for too long registers again.
-- Roles    work, operate
-- Takes    p_process: the process that registered, which does not wait for locks; null: whichever, waits for the lock.
-- Locks    the registration.
-- Returns  refreshed, with the time until which it counts as alive; not_registered; busy (it is locked).
create or replace function flowfabric.heartbeat_worker(p_namespace text, p_instance text, p_process uuid)
returns table (code text, expires_at timestamptz)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_tid tid;
    r flowfabric.registration;
begin
    perform flowfabric.require_read_committed();
    if p_process is null then
        select x.ctid into v_tid from flowfabric.registration x
        where x.namespace = p_namespace and x.worker_instance_id = p_instance for no key update;
    else
        select x.ctid into v_tid from flowfabric.registration x
        where x.namespace = p_namespace and x.worker_instance_id = p_instance for no key update skip locked;
    end if;
    v_now := flowfabric.now();
    if v_tid is not null then
        update flowfabric.registration x set heartbeat_at = greatest(x.heartbeat_at, v_now)
        where x.ctid = v_tid and flowfabric.is_alive(x, v_now) and (p_process is null or x.process = p_process)
        returning x.* into r;
        code := case when found then 'refreshed' else 'not_registered' end;
    else
        code := case when exists (select from flowfabric.registration x
                                  where x.namespace = p_namespace and x.worker_instance_id = p_instance)
                     then 'busy' else 'not_registered' end;
    end if;
    expires_at := r.heartbeat_at + r.liveness_ttl;
    if code = 'refreshed' and (select d.event_heartbeats from flowfabric.deployment d) then
        perform flowfabric.log_worker(r, 'heartbeat', null, v_now);
    end if;
    return next;
end;
$$;
