-- read_events: the log in one order that never changes behind a reader
--
-- Only events of transactions below the oldest one still running are shown, ordered by (transaction, number): nothing
-- can appear before what was read. p_family is lease, completion, operator or null for all.
create or replace function flowfabric.read_events(
    p_family text, p_after_xid bigint, p_after_seq bigint, p_limit integer, p_namespace text, p_tag_key text,
    p_tag_value text)
returns table (xid bigint, seq bigint, occurred_at timestamptz, partition integer, id uuid, flow_id uuid, namespace text,
               tags jsonb, lease_type text, outcome text, operator_type text, lease_id uuid, lease_epoch bigint,
               attempt_id uuid, attempt_index integer, worker_id text, worker_instance_id text, reason text,
               revoked_by text, details jsonb)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select e.xid::text::bigint, e.seq, e.occurred_at, e.partition, e.id, e.flow_id, e.namespace, e.tags, e.lease_type,
           e.outcome, e.operator_type, e.lease_id, e.lease_epoch, e.attempt_id, e.attempt_index, e.worker_id,
           e.worker_instance_id, e.reason, e.revoked_by, e.details
    from flowfabric.event e
    where (e.xid, e.seq) > (p_after_xid::text::xid8, p_after_seq)
      and e.xid < pg_snapshot_xmin(pg_current_snapshot())
      and case p_family when 'lease' then e.lease_type is not null when 'completion' then e.outcome is not null
                        when 'operator' then e.operator_type is not null else true end
      and (p_namespace is null or e.namespace = p_namespace)
      and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))
    order by e.xid, e.seq limit p_limit
$$;
