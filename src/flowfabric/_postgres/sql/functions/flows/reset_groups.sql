-- reset_groups: reset the groups of replayed executions: earlier failures of upstreams no longer count
--
-- An all_settled group counts the failures of upstreams that have not been replayed: they have ended.
-- Called under the locks of the groups, the executions and their upstreams.
create or replace function flowfabric.reset_groups(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_flows uuid[]; v_edges uuid[];
    v_refs boolean;
begin
    -- An upstream that was replayed first and succeeded counts; for the others only the next end does.
    with turned as (
        update flowfabric.edge d
        set outcome = case when n.counts then flowfabric.outcome_of(up.state) end,
            resolved_at = case when n.counts then p_now end, resolved_event = null,
            from_run = case when n.counts then d.from_run
                            else up.replays + case when up.completed_at is null then 0 else 1 end end,
            is_kept = false, kept_result = null, kept_encoding = null
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id,
        flowfabric.execution up
        cross join lateral (select up.completed_at is not null and (up.state = 'completed' or g.policy = 'all_settled') as counts) n
        where d.partition = u.partition and d.downstream = u.id and d.flow_id is not distinct from e.flow_id
          and d.applied_at is not null and d.outcome <> 'success' and up.partition = d.partition and up.id = d.upstream
        returning d.partition, d.flow_id, d.edge_id, d.outcome, d.data_passing_ref, up.completed_at
    )
    select array_agg(t.partition order by t.completed_at, t.edge_id), array_agg(t.flow_id order by t.completed_at, t.edge_id),
           array_agg(t.edge_id order by t.completed_at, t.edge_id), bool_or(t.data_passing_ref is not null)
    into v_partitions, v_flows, v_edges, v_refs
    from turned t where t.outcome = 'success';
    update flowfabric.edge d set is_in_time = true
    from unnest(p_partition, p_id) as u (partition, id)
    where d.partition = u.partition and d.downstream = u.id and d.outcome is not null and not d.is_in_time;
    update flowfabric.edge_group g
    set succeeded = c.succeeded, failed = c.failed, skipped = c.skipped,
        state = flowfabric.decide(g.policy, g.k, g.n, c.succeeded, c.failed + c.skipped, 'pending'),
        satisfied_at = case when flowfabric.decide(g.policy, g.k, g.n, c.succeeded, c.failed + c.skipped, 'pending') = 'satisfied'
                            then p_now end,
        cancel_siblings_pending = false, cancel_siblings_reason = null
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    cross join lateral (
        select count(*) filter (where d.outcome = 'success')::integer as succeeded,
               count(*) filter (where d.outcome = 'skipped')::integer as skipped,
               count(*) filter (where d.outcome in ('failed', 'cancelled', 'expired'))::integer as failed
        from flowfabric.edge d where d.partition = e.partition and d.downstream = e.id
                                     and d.flow_id is not distinct from e.flow_id) c
    where g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id;
    delete from flowfabric.sibling_cancel s
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where s.partition = e.partition and s.flow_id = e.flow_id and s.downstream = e.id;
    if v_refs then
        perform flowfabric.inject_results(v_partitions, v_flows, v_edges, p_now);
    end if;
    -- A race that is already won has losers too.
    perform flowfabric.enqueue_siblings(array_agg(g.partition), array_agg(g.flow_id), array_agg(g.downstream), null, p_now)
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
    where g.state = 'satisfied' and g.policy <> 'all_of' and g.cancel_rest having count(*) > 0;
end;
$$;
