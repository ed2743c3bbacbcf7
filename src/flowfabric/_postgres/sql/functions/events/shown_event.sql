-- shown_event: an event as readers get it: with the names of its worker and the lane and kind of its route
--
-- Called by read_events and list_events. It is planned as a part of them: it must stay one select without tables.
-- Takes    p_sees: whether the caller may see the ids of leases.
create or replace function flowfabric.shown_event(
    e flowfabric.event, w flowfabric.worker, r flowfabric.route, p_sees boolean)
returns table (seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, signal_effect text, worker_type text,
               lease_id uuid, lease_epoch bigint, attempt_id uuid, attempt_index integer, worker_id text,
               worker_instance_id text, reason text, revoked_by text, details jsonb, parent_id uuid, lane text, kind text,
               actor text)
language sql stable as $$
    select e.seq, e.occurred_at, e.partition, e.id, e.flow_id, e.namespace, e.tags, e.lease_type, e.outcome,
           e.operator_type, e.signal_effect, e.worker_type, case when p_sees then e.lease_id end, e.lease_epoch::bigint,
           e.attempt_id, e.attempt_index,
           coalesce(w.worker_id, case when e.worker_type is not null then e.details ->> 'worker_id' end),
           coalesce(w.worker_instance_id, case when e.worker_type is not null then e.details ->> 'worker_instance_id' end),
           e.reason, e.revoked_by, e.details, e.parent_id, r.lane, r.kind, e.actor
$$;
