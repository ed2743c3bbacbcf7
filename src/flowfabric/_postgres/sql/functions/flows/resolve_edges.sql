-- resolve_edges: count the ends of upstreams, decide their groups, and release or skip the downstreams.
--
-- Takes    edges, with the end of each one's upstream and its completion event, in the order in which they count.
-- Locks    the groups, then their downstreams, by id; never waits. Groups that cannot be fully locked are left alone.
-- Returns  the indexes of the edges left alone.
create or replace function flowfabric.resolve_edges(
    p_partition integer[], p_flow uuid[], p_edge uuid[], p_downstream uuid[], p_outcome text[], p_event bigint[],
    p_now timestamptz)
returns integer[]
language plpgsql as $$
declare
    v_g integer[];                 -- per edge: the number of its group
    v_n integer;                   -- how many groups
    v_held boolean[];              -- per group: locked, and to be handled
    v_pending boolean[]; v_group_tids tid[]; v_partitions integer[]; v_flows uuid[]; v_ids uuid[];
    -- The locked rows, in the order found.
    v_found integer[]; v_found_tids tid[]; v_found_pending boolean[];
    v_found_partitions integer[]; v_found_flows uuid[]; v_found_ids uuid[];
    v_no integer;
    v_satisfied integer[]; v_impossible integer[]; v_races integer[];
    v_refs boolean;
    v_left integer[];
begin
    -- Number the groups in the order of their locks.
    select array_agg(n.g order by n.ord) into v_g
    from (select u.ord, dense_rank() over (order by u.partition, u.downstream, u.flow)::integer as g
          from unnest(p_partition, p_flow, p_downstream) with ordinality as u (partition, flow, downstream, ord)) n;
    v_n := (select max(g) from unnest(v_g) g);
    v_held := array_fill(false, array[v_n]); v_pending := v_held;
    v_group_tids := array_fill('(0,0)'::tid, array[v_n]);
    v_partitions := array_fill(0, array[v_n]);
    v_ids := array_fill(flowfabric.zero_uuid(), array[v_n]); v_flows := v_ids;
    with wanted as (
        select distinct on (u.g) u.g, u.partition, u.flow, u.downstream
        from unnest(v_g, p_partition, p_flow, p_downstream) as u (g, partition, flow, downstream) order by u.g
    ), held as materialized (
        select w.g, g.ctid as tid, g.state = 'pending' as pending, w.partition, w.flow, w.downstream
        from wanted w
        join flowfabric.edge_group g on g.partition = w.partition and g.flow_id = w.flow and g.downstream = w.downstream
        join flowfabric.execution x on x.partition = w.partition and x.id = w.downstream
        for update of g skip locked for no key update of x skip locked
    )
    select array_agg(h.g), array_agg(h.tid), array_agg(h.pending),
           array_agg(h.partition), array_agg(h.flow), array_agg(h.downstream)
    into v_found, v_found_tids, v_found_pending, v_found_partitions, v_found_flows, v_found_ids
    from held h;
    -- Map the order found to the numbers of the groups. A loop: a join would be nested (the settings of complete allow
    -- no other) and quadratic.
    for i in 1 .. coalesce(cardinality(v_found), 0) loop
        v_no := v_found[i];
        v_held[v_no] := true;
        v_pending[v_no] := v_found_pending[i];
        v_group_tids[v_no] := v_found_tids[i];
        v_partitions[v_no] := v_found_partitions[i];
        v_flows[v_no] := v_found_flows[i];
        v_ids[v_no] := v_found_ids[i];
    end loop;
    if true = any (v_held) then
        with resolved as (
            update flowfabric.edge d
            set outcome = u.outcome, resolved_at = p_now, resolved_event = u.event, is_in_time = v_pending[u.g]
            from unnest(v_g, p_partition, p_flow, p_edge, p_outcome, p_event) as u (g, partition, flow, edge, outcome, event)
            where v_held[u.g] and d.partition = u.partition and d.flow_id = u.flow and d.edge_id = u.edge
              and d.outcome is null and d.applied_at is not null
            returning u.g, d.outcome, d.data_passing_ref
        ), counted as (
            select r.g, count(*) filter (where r.outcome = 'success')::integer as succeeded,
                   count(*) filter (where r.outcome = 'skipped')::integer as skipped, count(*)::integer as n,
                   bool_or(r.data_passing_ref is not null and r.outcome = 'success') as passes
            from resolved r group by r.g
        ), decided as (
            update flowfabric.edge_group g
            set succeeded = g.succeeded + c.succeeded, skipped = g.skipped + c.skipped,
                failed = g.failed + c.n - c.succeeded - c.skipped,
                state = flowfabric.decide(g.policy, g.k, g.n, g.succeeded + c.succeeded,
                                          g.failed + g.skipped + c.n - c.succeeded, g.state),
                satisfied_at = case when g.state = 'pending' and flowfabric.decide(
                        g.policy, g.k, g.n, g.succeeded + c.succeeded, g.failed + g.skipped + c.n - c.succeeded,
                        g.state) = 'satisfied' then p_now else g.satisfied_at end
            from counted c
            where g.ctid = v_group_tids[c.g]
            returning c.g, g.state, g.policy <> 'all_of' and g.cancel_rest as races,
                      g.succeeded + g.failed + g.skipped > g.n as overfull
        )
        select array_agg(d.g order by d.g) filter (where v_pending[d.g] and d.state = 'satisfied'),
               array_agg(d.g order by d.g) filter (where v_pending[d.g] and d.state = 'impossible'),
               array_agg(d.g order by d.g) filter (where v_pending[d.g] and d.state <> 'pending' and d.races),
               (select bool_or(c.passes) from counted c)
        into v_satisfied, v_impossible, v_races, v_refs
        from decided d
        where case when d.overfull then flowfabric.corrupt('an edge group has more ends than edges') else true end;
        if v_refs then
            perform flowfabric.inject_results(p_partition, p_flow, p_edge, p_now);
        end if;
        if v_satisfied is not null then
            perform flowfabric.release_members(
                (select array_agg(v_partitions[g]) from unnest(v_satisfied) g),
                (select array_agg(v_ids[g]) from unnest(v_satisfied) g), p_now);
        end if;
        if v_races is not null then
            perform flowfabric.enqueue_siblings(
                array_agg(v_partitions[g]), array_agg(v_flows[g]), array_agg(v_ids[g]), null, p_now) from unnest(v_races) g;
        end if;
        if v_impossible is not null then
            perform flowfabric.skip_members(
                array_agg(v_partitions[g]), array_agg(v_ids[g]), p_now) from unnest(v_impossible) g;
        end if;
    end if;
    select coalesce(array_agg(u.ord::integer), '{}') into v_left
    from unnest(v_g) with ordinality as u (g, ord) where not v_held[u.g];
    return v_left;
end;
$$;
