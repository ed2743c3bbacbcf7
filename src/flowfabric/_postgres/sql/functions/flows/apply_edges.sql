-- apply_edges: staged edges block their downstreams from now on
--
-- Called under the lock of the flow, with staged edges of it.
-- Locks    the groups by downstream, then upstreams and downstreams, by id: a call that ends one comes before (and is
--          seen here) or after (and sees the edge).
create or replace function flowfabric.apply_edges(p_partition integer, p_flow uuid, p_edge uuid[]) returns void
language plpgsql as $$
declare
    v_now timestamptz;
    v_tids tid[]; v_up uuid[]; v_down uuid[];                             -- per edge
    v_runs integer[]; v_outcomes text[]; v_ended timestamptz[];           -- per edge, of its upstream
    v_groups uuid[]; v_group_tids tid[]; v_pending boolean[];
    v_edges uuid[]; v_downstreams uuid[]; v_ends text[];
    v_lost uuid[]; v_late uuid[];
begin
    select array_agg(d.tid order by u.ord), array_agg(d.upstream order by u.ord), array_agg(d.downstream order by u.ord)
    into v_tids, v_up, v_down
    from unnest(p_edge) with ordinality as u (id, ord)
    cross join lateral (select x.ctid as tid, x.upstream, x.downstream from flowfabric.edge x
                        where x.partition = p_partition and x.flow_id = p_flow and x.edge_id = u.id offset 0) d;
    insert into flowfabric.edge_group (partition, flow_id, downstream)
    select distinct p_partition, p_flow, u.id from unnest(v_down) u (id) order by u.id
    on conflict do nothing;
    with held as materialized (
        select n.id, g.tid, g.pending from (select distinct u.id from unnest(v_down) u (id) order by u.id) n
        cross join lateral (select x.ctid as tid, x.state = 'pending' as pending from flowfabric.edge_group x
                            where x.partition = p_partition and x.flow_id = p_flow and x.downstream = n.id
                            offset 0 for update) g
    )
    select array_agg(h.id), array_agg(h.tid), array_agg(h.pending) into v_groups, v_group_tids, v_pending from held h;
    perform flowfabric.lock_members(p_partition, v_up || v_down);
    v_now := flowfabric.now();

    select array_agg(up.replays order by u.ord),
           array_agg(case when up.completed_at is not null then flowfabric.outcome_of(up.state) end order by u.ord),
           array_agg(up.completed_at order by u.ord)
    into v_runs, v_outcomes, v_ended
    from unnest(v_up) with ordinality as u (id, ord)
    cross join lateral (select x.replays, x.state, x.completed_at from flowfabric.execution x
                        where x.partition = p_partition and x.id = u.id offset 0) up;
    -- The ends of earlier runs do not count.
    update flowfabric.edge d set applied_at = v_now, from_run = u.run
    from unnest(v_tids, v_runs) as u (tid, run) where d.ctid = u.tid;
    -- A new edge reopens a satisfied all_of or all_settled, and may be the one that makes a quorum impossible; other decisions are
    -- final. An execution with an open edge is blocked before anything is resolved, so that it can be released.
    with counted as (
        select c.id, u.tid, u.pending, c.n, c.live, c.last
        from (select e.down as id, count(*)::integer as n, count(*) filter (where e.outcome is null) as live,
                     max(e.edge::text) as last
              from unnest(p_edge, v_down, v_outcomes) as e (edge, down, outcome) group by e.down) c
        join unnest(v_groups, v_group_tids, v_pending) as u (id, tid, pending) on u.id = c.id
    ), opened as (
        update flowfabric.edge_group g
        set n = g.n + c.n,
            state = flowfabric.decide(g.policy, g.k, g.n + c.n, g.succeeded, g.failed + g.skipped, g.state),
            satisfied_at = case when g.policy in ('all_of', 'all_settled') then null else g.satisfied_at end
        from counted c where g.ctid = c.tid
        returning g.downstream, g.state, c.pending, c.last,
                  g.n - g.succeeded - g.failed - g.skipped - c.n + c.live as unsatisfied
    )
    select array_agg(e.id) filter (where o.state = 'pending' and e.can_wait),
           array_agg(o.unsatisfied || ' dep(s) unresolved incl ' || o.last) filter (where o.state = 'pending' and e.can_wait),
           array_agg(o.downstream) filter (where o.state = 'impossible' and o.pending)
    into v_edges, v_ends, v_lost
    from opened o
    cross join lateral (select x.id, x.state in ('waiting', 'delayed', 'rate_limited', 'resumable', 'waiting_children')
                               and x.blocking_reason is distinct from 'paused_by_flow_cancel' as can_wait
                        from flowfabric.execution x where x.partition = p_partition and x.id = o.downstream offset 0) e;
    if v_edges is not null then
        perform flowfabric.block_members(array_fill(p_partition, array[cardinality(v_edges)]), v_edges, v_ends, v_now);
    end if;
    -- Upstreams that have ended count immediately.
    select array_agg(e.edge order by e.ended, e.ord), array_agg(e.down order by e.ended, e.ord),
           array_agg(e.outcome order by e.ended, e.ord)
    into v_edges, v_downstreams, v_ends
    from unnest(p_edge, v_down, v_outcomes, v_ended) with ordinality as e (edge, down, outcome, ended, ord)
    where e.outcome is not null;
    if v_edges is not null then
        if flowfabric.resolve_edges(
               array_fill(p_partition, array[cardinality(v_edges)]), array_fill(p_flow, array[cardinality(v_edges)]),
               v_edges, v_downstreams, v_ends, array_fill(null::bigint, array[cardinality(v_edges)]), v_now) <> '{}' then
            perform flowfabric.corrupt('an edge group was not ours');
        end if;
    end if;
    if v_lost is not null then
        perform flowfabric.enqueue_siblings(
            array_agg(p_partition), array_agg(p_flow), array_agg(n.id), null, v_now)
        from unnest(v_lost) n (id)
        cross join lateral (select 1 from flowfabric.edge_group x where x.partition = p_partition and x.flow_id = p_flow
                            and x.downstream = n.id and x.cancel_rest offset 0) g
        having count(*) > 0;
        perform flowfabric.skip_members(array_fill(p_partition, array[cardinality(v_lost)]), v_lost, v_now);
    end if;
    -- Late losers of a decided race.
    select array_agg(n.id) into v_late
    from (select distinct e.down as id from unnest(v_down, v_outcomes) as e (down, outcome) where e.outcome is null) n
    cross join lateral (select 1 from flowfabric.edge_group x where x.partition = p_partition and x.flow_id = p_flow
                        and x.downstream = n.id and x.state <> 'pending' and x.policy <> 'all_of' and x.cancel_rest offset 0) g;
    if v_late is not null then
        perform flowfabric.enqueue_siblings(
            array_fill(p_partition, array[cardinality(v_late)]), array_fill(p_flow, array[cardinality(v_late)]), v_late,
            p_edge, v_now);
    end if;
    insert into flowfabric.flow_touched values (p_partition, p_flow);
    -- A concurrent claim skipped them.
    perform flowfabric.wake_for(array_fill(p_partition, array[cardinality(v_up) + cardinality(v_down)]), v_up || v_down);
end;
$$;
