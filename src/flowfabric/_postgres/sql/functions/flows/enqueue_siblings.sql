-- enqueue_siblings: queue unfinished upstreams of decided groups for cancellation.
--
-- Called under the locks of the groups. p_edge: only upstreams of these edges; null: all.
create or replace function flowfabric.enqueue_siblings(
    p_partition integer[], p_flow uuid[], p_downstream uuid[], p_edge uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    insert into flowfabric.sibling_cancel as s (partition, flow_id, downstream, siblings, enqueued_at, due_at)
    select u.partition, u.flow, u.downstream, l.siblings, p_now, p_now
    from unnest(p_partition, p_flow, p_downstream) as u (partition, flow, downstream)
    cross join lateral (
        select coalesce(array_agg(distinct d.upstream), '{}') as siblings
        from flowfabric.edge d
        join flowfabric.execution x on x.partition = d.partition and x.id = d.upstream and x.completed_at is null
        where d.partition = u.partition and d.downstream = u.downstream and d.flow_id is not distinct from u.flow
          and d.applied_at is not null and (p_edge is null or d.edge_id = any (p_edge))) l
    on conflict (partition, flow_id, downstream) do update
        set siblings = (select coalesce(array_agg(distinct x), '{}') from unnest(s.siblings || excluded.siblings) x);
    update flowfabric.edge_group g
    set cancel_siblings_pending = true,
        cancel_siblings_reason = case g.state when 'satisfied' then 'sibling_quorum_satisfied' else 'sibling_quorum_impossible' end
    from unnest(p_partition, p_flow, p_downstream) as u (partition, flow, downstream)
    where g.partition = u.partition and g.flow_id = u.flow and g.downstream = u.downstream;
    perform flowfabric.wake_duties(p_now);
end;
$$;
