-- queued_siblings: the groups with siblings to cancel, oldest first.
--
-- Roles    read, work, operate
create or replace function flowfabric.queued_siblings(p_limit integer)
returns table (partition integer, flow_id uuid, downstream uuid, siblings uuid[], enqueued_at timestamptz)
language sql stable security definer as $$
    select s.partition, s.flow_id, s.downstream, s.siblings, s.enqueued_at
    from flowfabric.sibling_cancel s order by s.enqueued_at limit p_limit
$$;
