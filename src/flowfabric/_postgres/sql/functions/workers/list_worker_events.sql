-- list_worker_events: what happened to a worker, newest first
--
-- Roles    read, work, operate
-- Takes    p_before: only events with a lower number; null: from the newest on.
create or replace function flowfabric.list_worker_events(
    p_namespace text, p_instance text, p_before bigint, p_limit integer)
returns table (seq bigint, occurred_at timestamptz, event text, worker_id text, reason text)
language sql stable security definer as $$
    select w.seq, w.occurred_at, w.event, w.worker_id, w.reason from flowfabric.worker_event w
    where w.namespace = p_namespace and w.worker_instance_id = p_instance and (p_before is null or w.seq < p_before)
    order by w.seq desc limit p_limit
$$;
