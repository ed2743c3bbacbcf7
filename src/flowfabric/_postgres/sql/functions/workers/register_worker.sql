-- register_worker: a worker says that it is there, and what it serves
--
-- Called by workers when they start, when what they serve changes, and when they were forgotten.
-- Roles    work, operate
-- Takes    p_process: the process that registers; null: not told. p_exclusive: refuse if another process has registered
--          this instance and is alive.
-- Locks    the registration, then the verdicts it lifts (see judge_routes.sql), and waits for them.
-- Returns  registered, refreshed (it was alive; since when it is registered is kept), or the refusal: reassigned (another
--          worker_id has the instance), instance_in_use; until when it counts as alive; and where the other one runs.
create or replace function flowfabric.register_worker(
    p_namespace text, p_instance text, p_worker text, p_lanes text[], p_kinds text[], p_versions integer[],
    p_digests text[], p_capabilities text[], p_ttl_ms bigint, p_slots integer, p_package text, p_host text, p_pid integer, p_process uuid,
    p_exclusive boolean)
returns table (code text, expires_at timestamptz, host text, pid integer)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_service integer;
    r flowfabric.registration;
    v_new flowfabric.registration;
begin
    perform flowfabric.require_read_committed();
    if p_ttl_ms not between 1 and 10000000000000 or greatest(array_ndims(p_lanes), array_ndims(p_kinds)) > 1
       or greatest(octet_length(p_worker), octet_length(p_instance), octet_length(p_namespace), octet_length(p_host)) > 256 then
        raise exception 'the time to live, a list or a name is out of bounds' using errcode = 'invalid_parameter_value';
    end if;
    v_service := flowfabric.register_service(p_kinds, p_versions, p_digests, p_capabilities);
    loop
        select x.* into r from flowfabric.registration x
        where x.namespace = p_namespace and x.worker_instance_id = p_instance for no key update;
        v_now := flowfabric.now();
        code := case when not found or not flowfabric.is_alive(r, v_now) then 'registered'
                     when r.worker_id <> p_worker then 'reassigned'
                     when p_exclusive and r.process is distinct from p_process then 'instance_in_use'
                     else 'refreshed' end;
        expires_at := case when code in ('reassigned', 'instance_in_use') then r.heartbeat_at + r.liveness_ttl end;
        if expires_at is not null then
            host := r.host; pid := r.pid;
            return next;
            return;
        end if;
        -- A clock that was set back does not move a heartbeat back.
        insert into flowfabric.registration as x
            (namespace, worker_instance_id, registered_at, liveness_ttl, process, service, slots, pid, worker_id, lanes,
             host, package_version, heartbeat_at)
        values
            (p_namespace, p_instance, case code when 'refreshed' then r.registered_at else v_now end,
             flowfabric.ms(p_ttl_ms), p_process, v_service, p_slots, p_pid, p_worker, p_lanes, p_host, p_package,
             case code when 'refreshed' then greatest(r.heartbeat_at, v_now) else v_now end)
        on conflict (namespace, worker_instance_id) do update
            set registered_at = excluded.registered_at, liveness_ttl = excluded.liveness_ttl,
                process = excluded.process, service = excluded.service, slots = excluded.slots, pid = excluded.pid,
                worker_id = excluded.worker_id, lanes = excluded.lanes, host = excluded.host,
                package_version = excluded.package_version, heartbeat_at = excluded.heartbeat_at
            where r.worker_instance_id is not null   -- the row that is locked; else another call was faster: look again
        returning x.* into v_new;
        exit when found;
    end loop;
    if code = 'registered' and r.worker_instance_id is not null then
        perform flowfabric.log_worker(r, 'ttl_swept', null, v_now);   -- the sweep will not find the one before
    end if;
    perform flowfabric.log_worker(v_new, 'registered', nullif(code, 'registered'), v_now);
    perform flowfabric.lift_verdicts(v_new);
    if code = 'refreshed' and (r.service <> v_new.service or r.lanes <> v_new.lanes) then
        perform flowfabric.judge_lanes(r.lanes || v_new.lanes);
    end if;
    expires_at := v_new.heartbeat_at + v_new.liveness_ttl;
    return next;
end;
$$;
