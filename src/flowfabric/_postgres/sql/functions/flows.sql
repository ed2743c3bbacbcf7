-- Flows: making them, adding members and edges, and the policies of their joins.
--
-- Lock order: the flow (for update where the graph grows, else shared), groups by downstream, executions by id.

-- create_flow: Created, or exists when the id was used before.
create or replace function flowfabric.create_flow(p_partition integer, p_flow uuid, p_kind text, p_namespace text)
returns boolean
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz := flowfabric.now();
begin
    insert into flowfabric.flow (partition, flow_id, flow_kind, namespace, created_at, last_mutation_at)
    values (p_partition, p_flow, p_kind, p_namespace, v_now, v_now)
    on conflict do nothing;
    return found;
end;
$$;

-- open_flow: lock a flow that may still change; answers why it may not.
create or replace function flowfabric.open_flow(p_partition integer, p_flow uuid, p_grows boolean) returns text
language plpgsql as $$
declare
    v_state text;
begin
    if p_grows then
        select f.state into v_state from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow
        for no key update;
    else
        select f.state into v_state from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow for share;
    end if;
    return case when v_state is null then 'flow_not_found' when v_state <> 'open' then 'flow_already_terminal' end;
end;
$$;

-- lock_members: lock executions of one partition, by id.
create or replace function flowfabric.lock_members(p_partition integer, p_id uuid[]) returns void
language plpgsql as $$
begin
    perform 1 from (select distinct u.id from unnest(p_id) u (id) order by u.id) n
    cross join lateral (select 1 from flowfabric.execution x where x.partition = p_partition and x.id = n.id
                        offset 0 for no key update) e;
end;
$$;

-- add_to_flow: make executions members, all or none
--
-- Locks    the flow, then the executions, by id.
-- Answers  one row: ok, already_member (all of them were; number: the members now) or why not, with the place of the
--          first execution in the way and, for execution_already_in_flow, the other flow.
create or replace function flowfabric.add_to_flow(p_partition integer, p_flow uuid, p_id uuid[])
returns table (code text, place integer, other uuid, members integer)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_new integer;
begin
    perform flowfabric.require_read_committed();
    code := flowfabric.open_flow(p_partition, p_flow, true);
    if code is null then
        perform flowfabric.lock_members(p_partition, p_id);
        select case when e.id is null then 'execution_not_found' else 'execution_already_in_flow' end, u.ord::integer, e.flow_id
        into code, place, other
        from unnest(p_id) with ordinality as u (id, ord)
        left join lateral (select x.* from flowfabric.execution x where x.partition = p_partition and x.id = u.id offset 0) e on true
        where e.id is null or e.flow_id <> p_flow
        order by u.ord limit 1;
    end if;
    if code is null then
        v_now := flowfabric.now();
        update flowfabric.execution e set flow_id = p_flow, mutated_at = v_now
        from (select distinct x.tid from unnest(p_id) u (id)
              cross join lateral (select y.ctid as tid from flowfabric.execution y
                                  where y.partition = p_partition and y.id = u.id and y.flow_id is null offset 0) x) n
        where e.ctid = n.tid;
        get diagnostics v_new = row_count;
        code := case when v_new = 0 then 'already_member' else 'ok' end;
        if v_new > 0 then
            update flowfabric.flow f set node_count = f.node_count + v_new, last_mutation_at = v_now
            where f.partition = p_partition and f.flow_id = p_flow;
            insert into flowfabric.flow_touched values (p_partition, p_flow);
            -- What ended before it became a member had nobody to tell; it has no edges yet either.
            perform flowfabric.wake_workers();   -- a claim that came meanwhile passed them over
        end if;
        select f.node_count into members from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow;
    end if;
    return next;
end;
$$;

-- reaches: whether there is a way from one member to another over the edges of its flow.
create or replace function flowfabric.reaches(p_partition integer, p_flow uuid, p_from uuid, p_to uuid) returns boolean
language plpgsql as $$
begin
    -- The two cases in which there is nothing to walk: a node at the end of the graph, or one at its beginning.
    if not exists (select from flowfabric.edge d where d.partition = p_partition and d.upstream = p_from and d.flow_id = p_flow)
       or not exists (select from flowfabric.edge d where d.partition = p_partition and d.downstream = p_to and d.flow_id = p_flow) then
        return false;
    end if;
    return exists (
        with recursive reached (id) as (
            select p_from
            union
            select d.downstream from reached r
            cross join lateral (select x.downstream from flowfabric.edge x
                                where x.partition = p_partition and x.upstream = r.id and x.flow_id = p_flow offset 0) d
        )
        select from reached r where r.id = p_to);
end;
$$;

-- has_cycle: whether edges, as pairs of node numbers from 1 to p_nodes, contain a cycle (Kahn; each edge once).
create or replace function flowfabric.has_cycle(p_from integer[], p_to integer[], p_nodes integer) returns boolean
language plpgsql immutable as $$
declare
    v_waits integer[] := array_fill(0, array[p_nodes]);    -- unseen edges into each node
    v_first integer[] := array_fill(0, array[p_nodes]);    -- the first edge out of each node
    v_next integer[] := array_fill(0, array[greatest(cardinality(p_from), 1)]);   -- the next edge of the same node
    v_stack integer[] := array_fill(0, array[p_nodes]);
    v_top integer := 0;
    v_seen integer := 0;
    v_node integer;
    v_edge integer;
begin
    for i in 1 .. cardinality(p_from) loop
        v_waits[p_to[i]] := v_waits[p_to[i]] + 1;
        v_next[i] := v_first[p_from[i]];
        v_first[p_from[i]] := i;
    end loop;
    for i in 1 .. p_nodes loop
        if v_waits[i] = 0 then
            v_top := v_top + 1; v_stack[v_top] := i;
        end if;
    end loop;
    while v_top > 0 loop
        v_node := v_stack[v_top]; v_top := v_top - 1; v_seen := v_seen + 1;
        v_edge := v_first[v_node];
        while v_edge > 0 loop
            v_waits[p_to[v_edge]] := v_waits[p_to[v_edge]] - 1;
            if v_waits[p_to[v_edge]] = 0 then
                v_top := v_top + 1; v_stack[v_top] := p_to[v_edge];
            end if;
            v_edge := v_next[v_edge];
        end loop;
    end loop;
    return v_seen < p_nodes;
end;
$$;

-- closes_cycle: the place of the first of some new edges that closes a cycle with the stored ones and those before it.
create or replace function flowfabric.closes_cycle(
    p_partition integer, p_flow uuid, p_upstream uuid[], p_downstream uuid[]) returns integer
language plpgsql as $$
declare
    v_from integer[]; v_to integer[]; v_old integer; v_nodes integer;
    v_low integer := 1; v_high integer := cardinality(p_upstream); v_middle integer;
begin
    -- Every new cycle lies in what can be reached from the ends of the new edges.
    with recursive reached (id) as (
        select u.id from unnest(p_downstream) u (id)
        union
        select d.downstream from reached r
        cross join lateral (select x.downstream from flowfabric.edge x
                            where x.partition = p_partition and x.upstream = r.id and x.flow_id = p_flow offset 0) d
    ), start (id) as (
        select id from reached union select u.id from unnest(p_upstream) u (id)
    ), numbered as materialized (
        select s.id, row_number() over (order by s.id)::integer as no from start s
    ), old as (
        select a.no as f, b.no as t from numbered a
        cross join lateral (select x.downstream from flowfabric.edge x
                            where x.partition = p_partition and x.upstream = a.id and x.flow_id = p_flow offset 0) x
        join numbered b on b.id = x.downstream
    ), new as (
        select a.no as f, b.no as t, n.ord from unnest(p_upstream, p_downstream) with ordinality as n (upstream, downstream, ord)
        join numbered a on a.id = n.upstream join numbered b on b.id = n.downstream
    )
    select (select coalesce(array_agg(o.f), '{}') from old o) || (select array_agg(n.f order by n.ord) from new n),
           (select coalesce(array_agg(o.t), '{}') from old o) || (select array_agg(n.t order by n.ord) from new n),
           (select count(*) from old o), (select count(*) from numbered)
    into v_from, v_to, v_old, v_nodes;
    if not flowfabric.has_cycle(v_from, v_to, v_nodes) then
        return null;
    end if;
    while v_low < v_high loop
        v_middle := (v_low + v_high) / 2;
        if flowfabric.has_cycle(v_from[:v_old + v_middle], v_to[:v_old + v_middle], v_nodes) then
            v_high := v_middle;
        else
            v_low := v_middle + 1;
        end if;
    end loop;
    return v_low;
end;
$$;

-- stage_edges: put edges into the graph of a flow; they gate nothing until they are applied
--
-- Called with one edge, or with many and p_apply: then all or none are staged and applied.
-- Locks    the flow; with p_apply also the groups, then all executions concerned, by id.
-- Answers  one row: ok with the revision now; or why not, with the place of the first edge in the way.
create or replace function flowfabric.stage_edges(
    p_partition integer, p_flow uuid, p_edge uuid[], p_upstream uuid[], p_downstream uuid[], p_ref text[],
    p_revision bigint, p_apply boolean)
returns table (code text, place integer, revision bigint)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_n integer := cardinality(p_edge);
begin
    perform flowfabric.require_read_committed();
    code := flowfabric.open_flow(p_partition, p_flow, true);
    select f.node_count + f.edge_count into revision from flowfabric.flow f
    where f.partition = p_partition and f.flow_id = p_flow;
    if code is null and revision <> p_revision then
        code := 'stale_graph_revision';
    end if;
    if code is null then
        select 'execution_not_in_flow', u.ord::integer into code, place
        from unnest(p_upstream, p_downstream) with ordinality as u (upstream, downstream, ord)
        left join lateral (select x.* from flowfabric.execution x where x.partition = p_partition and x.id = u.upstream offset 0) a on true
        left join lateral (select x.* from flowfabric.execution x where x.partition = p_partition and x.id = u.downstream offset 0) b on true
        where (a.flow_id = p_flow and b.flow_id = p_flow) is not true
        order by u.ord limit 1;
    end if;
    if code is null then
        if v_n = 1 then
            place := case when flowfabric.reaches(p_partition, p_flow, p_downstream[1], p_upstream[1]) then 1 end;
        else
            place := flowfabric.closes_cycle(p_partition, p_flow, p_upstream, p_downstream);
        end if;
        code := case when place is not null then 'cycle_detected' end;
    end if;
    if code is null then
        select 'dependency_already_exists', u.ord::integer into code, place
        from (select e.*, row_number() over (partition by e.id order by e.ord) as nth
              from unnest(p_edge) with ordinality as e (id, ord)) u
        left join lateral (select x.* from flowfabric.edge x
                           where x.partition = p_partition and x.flow_id = p_flow and x.edge_id = u.id offset 0) d on true
        where d.edge_id is not null or u.nth > 1
        order by u.ord limit 1;
    end if;
    if code is null then
        v_now := flowfabric.now();
        insert into flowfabric.edge (partition, flow_id, edge_id, upstream, downstream, data_passing_ref, created_at)
        select p_partition, p_flow, u.edge, u.upstream, u.downstream, u.ref, v_now
        from unnest(p_edge, p_upstream, p_downstream, p_ref) as u (edge, upstream, downstream, ref);
        update flowfabric.flow f set edge_count = f.edge_count + v_n, last_mutation_at = v_now
        where f.partition = p_partition and f.flow_id = p_flow;
        if p_apply then
            perform flowfabric.apply_edges(p_partition, p_flow, p_edge);
        end if;
        code := 'ok'; place := null; revision := revision + v_n;
    end if;
    return next;
end;
$$;

-- apply_edges: staged edges gate their downstreams from now on
--
-- Called under the lock of the flow, with staged edges of it.
-- Locks    the groups by downstream, then upstreams and downstreams, by id: whatever ends one of them comes before (and
--          is seen here) or after (and sees the edge).
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
    -- How a run before the present one ended does not count.
    update flowfabric.edge d set applied_at = v_now, from_run = u.run
    from unnest(v_tids, v_runs) as u (tid, run) where d.ctid = u.tid;
    -- A new edge opens a satisfied all_of again, and may be the one that shows that too many of a quorum were lost; other
    -- decisions stand. Who waits for something that is still open is blocked before anything is resolved, so that it may
    -- be released.
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
            satisfied_at = case when g.policy = 'all_of' then null else g.satisfied_at end
        from counted c where g.ctid = c.tid
        returning g.downstream, g.state, c.pending, c.last,
                  g.n - g.succeeded - g.failed - g.skipped - c.n + c.live as unsatisfied
    )
    select array_agg(e.id) filter (where o.state = 'pending' and e.stands),
           array_agg(o.unsatisfied || ' dep(s) unresolved incl ' || o.last) filter (where o.state = 'pending' and e.stands),
           array_agg(o.downstream) filter (where o.state = 'impossible' and o.pending)
    into v_edges, v_ends, v_lost
    from opened o
    cross join lateral (select x.id, x.state in ('waiting', 'delayed', 'rate_limited', 'resumable', 'waiting_children')
                               and x.blocking_reason is distinct from 'paused_by_flow_cancel' as stands
                        from flowfabric.execution x where x.partition = p_partition and x.id = o.downstream offset 0) e;
    if v_edges is not null then
        perform flowfabric.block_members(array_fill(p_partition, array[cardinality(v_edges)]), v_edges, v_ends, v_now);
    end if;
    -- Upstreams that have ended count at once.
    select array_agg(e.edge order by e.ended, e.ord), array_agg(e.down order by e.ended, e.ord),
           array_agg(e.outcome order by e.ended, e.ord)
    into v_edges, v_downstreams, v_ends
    from unnest(p_edge, v_down, v_outcomes, v_ended) with ordinality as e (edge, down, outcome, ended, ord)
    where e.outcome is not null;
    if v_edges is not null then
        perform flowfabric.hold_routes((
            select array_agg(distinct e.route) from unnest(v_downstreams) u (id)
            cross join lateral (select x.route from flowfabric.execution x
                                where x.partition = p_partition and x.id = u.id offset 0) e));
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
    -- Late losers of a race that is over.
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
    perform flowfabric.wake_workers();   -- a claim that came meanwhile passed them over
end;
$$;

-- apply_edge: a staged edge gates its downstream from now on
--
-- Answers  ok or already_applied with the number of unsatisfied edges into the downstream; or why not.
create or replace function flowfabric.apply_edge(
    p_partition integer, p_flow uuid, p_edge uuid, p_upstream uuid, p_downstream uuid, p_kind_known boolean, p_ref text)
returns table (code text, unsatisfied integer, detail text)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    d flowfabric.edge;
    v_member uuid;
begin
    perform flowfabric.require_read_committed();
    code := flowfabric.open_flow(p_partition, p_flow, false);
    if code is null then
        select x.* into d from flowfabric.edge x
        where x.partition = p_partition and x.flow_id = p_flow and x.edge_id = p_edge for update;
        if d.edge_id is null then
            code := 'edge_not_found';
        elsif (d.upstream, d.downstream) is distinct from (p_upstream, p_downstream)
              or not p_kind_known or d.data_passing_ref is distinct from p_ref then
            code := 'edge_differs';
            detail := case when d.upstream <> p_upstream then 'upstream_execution_id'
                           when d.downstream <> p_downstream then 'downstream_execution_id'
                           when not p_kind_known then 'dependency_kind' else 'data_passing_ref' end;
        else
            select e.flow_id into v_member from flowfabric.execution e where e.partition = p_partition and e.id = d.downstream;
            code := case when not found then 'execution_not_found' when v_member is null then 'execution_not_in_flow'
                         when v_member <> p_flow then 'execution_already_in_flow'
                         when d.applied_at is not null then 'already_applied' else 'ok' end;
        end if;
    end if;
    if code = 'ok' then
        perform flowfabric.apply_edges(p_partition, p_flow, array[p_edge]);
    end if;
    if code in ('ok', 'already_applied') then
        select g.n - g.succeeded - g.failed - g.skipped into unsatisfied from flowfabric.edge_group g
        where g.partition = p_partition and g.flow_id = p_flow and g.downstream = d.downstream;
    end if;
    return next;
end;
$$;

-- set_group_policy: how the edges into an execution join; before the first of them is staged
--
-- Answers  set, already_set, or why not.
create or replace function flowfabric.set_group_policy(
    p_partition integer, p_flow uuid, p_downstream uuid, p_policy text, p_k integer, p_cancel_rest boolean) returns text
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_code text := flowfabric.open_flow(p_partition, p_flow, true);
    g flowfabric.edge_group;
begin
    if v_code is not null then
        return v_code;
    end if;
    if exists (select from flowfabric.edge d
               where d.partition = p_partition and d.downstream = p_downstream and d.flow_id = p_flow) then
        return 'edge_group_policy_already_fixed';
    end if;
    select x.* into g from flowfabric.edge_group x
    where x.partition = p_partition and x.flow_id = p_flow and x.downstream = p_downstream for update;
    if g.downstream is not null and (g.policy, g.cancel_rest) = (p_policy, p_cancel_rest) and g.k is not distinct from p_k then
        return 'already_set';
    end if;
    insert into flowfabric.edge_group as x (partition, flow_id, downstream, policy, k, cancel_rest)
    values (p_partition, p_flow, p_downstream, p_policy, p_k, p_cancel_rest)
    on conflict (partition, flow_id, downstream) do update
        set policy = excluded.policy, k = excluded.k, cancel_rest = excluded.cancel_rest;
    return 'set';
end;
$$;
