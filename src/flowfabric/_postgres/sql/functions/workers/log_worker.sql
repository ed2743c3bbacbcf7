-- log_worker: append an event of a worker. The caller holds the lock of its registration: events of a worker are in order.
create or replace function flowfabric.log_worker(
    r flowfabric.registration, p_event text, p_reason text, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
begin
    insert into flowfabric.worker_event (occurred_at, event, namespace, worker_instance_id, worker_id, reason)
    values (p_now, p_event, r.namespace, r.worker_instance_id, r.worker_id, p_reason);
    insert into flowfabric.event (slot, occurred_at, partition, namespace, worker_type, reason, details)
    values (v_slot, p_now, 0, r.namespace, p_event, p_reason,
            jsonb_build_object('worker_instance_id', r.worker_instance_id, 'worker_id', r.worker_id));
end;
$$;
