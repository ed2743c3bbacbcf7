-- Edge groups: what the ends of upstreams come to. The only place where edges are resolved.

-- decide: the state of a group by its policy. A decided any_of or quorum keeps its first decision; impossible is final.
create or replace function flowfabric.decide(
    p_policy text, p_k integer, p_n integer, p_succeeded integer, p_lost integer, p_before text) returns text
language sql immutable as $$
    select case
        when p_before = 'impossible' or (p_before = 'satisfied' and p_policy <> 'all_of') then p_before
        when p_policy = 'all_of' then
            case when p_lost > 0 then 'impossible' when p_n > 0 and p_succeeded = p_n then 'satisfied' else 'pending' end
        when p_succeeded >= p_k then 'satisfied'
        when p_n >= p_k and p_lost > p_n - p_k then 'impossible'
        else 'pending' end
$$;

-- outcome_of: how an ended execution's state is called where it is an upstream.
create or replace function flowfabric.outcome_of(p_state text) returns text
language sql immutable as $$ select case p_state when 'completed' then 'success' else p_state end $$;

-- resolve_edges: count the ends of upstreams, decide their groups, and do what that means for the downstreams.
--
-- Takes    edges, with the end of each one's upstream and its completion event, in the order in which they count.
-- Locks    the groups, then their downstreams, by id; never waits. Groups that cannot be had whole are left alone.
-- Answers  the places of the edges left alone.
create or replace function flowfabric.resolve_edges(
    p_partition integer[], p_flow uuid[], p_edge uuid[], p_downstream uuid[], p_outcome text[], p_event bigint[],
    p_now timestamptz)
returns integer[]
language plpgsql as $$
declare
    v_g integer[];                 -- per edge: the number of its group
    v_n integer;                   -- how many groups
    v_held boolean[];              -- per group: ours, and to be worked on
    v_pending boolean[]; v_group_tids tid[]; v_partitions integer[]; v_flows uuid[]; v_ids uuid[];
    -- What was locked, in the order it was found.
    v_found integer[]; v_found_tids tid[]; v_found_routes integer[]; v_found_pending boolean[]; v_found_waits boolean[];
    v_found_partitions integer[]; v_found_flows uuid[]; v_found_ids uuid[];
    v_closed integer[];
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
    v_ids := array_fill('00000000-0000-0000-0000-000000000000'::uuid, array[v_n]); v_flows := v_ids;
    with wanted as (
        select distinct on (u.g) u.g, u.partition, u.flow, u.downstream
        from unnest(v_g, p_partition, p_flow, p_downstream) as u (g, partition, flow, downstream) order by u.g
    ), held as materialized (
        select w.g, g.ctid as tid, x.route, g.state = 'pending' as pending, x.state = 'waiting_children' as waits,
               w.partition, w.flow, w.downstream
        from wanted w
        join flowfabric.edge_group g on g.partition = w.partition and g.flow_id = w.flow and g.downstream = w.downstream
        join flowfabric.execution x on x.partition = w.partition and x.id = w.downstream
        for update of g skip locked for no key update of x skip locked
    )
    select array_agg(h.g), array_agg(h.tid), array_agg(h.route), array_agg(h.pending), array_agg(h.waits),
           array_agg(h.partition), array_agg(h.flow), array_agg(h.downstream)
    into v_found, v_found_tids, v_found_routes, v_found_pending, v_found_waits, v_found_partitions, v_found_flows, v_found_ids
    from held h;
    -- Whoever is released is inserted into the ready rows of its route; that must not wait either.
    select array_agg(r.route) into v_closed
    from (select distinct u.route from unnest(v_found_routes, v_found_waits) as u (route, waits) where u.waits) r
    where not pg_try_advisory_xact_lock_shared(flowfabric.ready_lock(), r.route);
    for i in 1 .. coalesce(cardinality(v_found), 0) loop
        v_no := v_found[i];
        v_held[v_no] := v_closed is null or not v_found_waits[i] or v_found_routes[i] <> all (v_closed);
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

-- corrupt: stop here, and undo what was done.
create or replace function flowfabric.corrupt(p_message text) returns boolean
language plpgsql as $$
begin
    raise exception '%', p_message using errcode = 'FF004';
end;
$$;

-- inject_results: results of upstreams become the input of their downstreams, where an edge asks for it.
--
-- Called under the locks of the groups, after these edges were resolved. all_of: the last success that counts; any_of
-- and quorum: the one that decided the group.
create or replace function flowfabric.inject_results(
    p_partition integer[], p_flow uuid[], p_edge uuid[], p_now timestamptz) returns void
language sql volatile as $$
    with injected as (
    insert into flowfabric.injected_input as i (partition, id, upstream, payload, encoding, injected_at)
    select distinct on (c.partition, c.downstream) c.partition, c.downstream, c.upstream, up.result, up.result_encoding, p_now
    from (select d.*, g.policy, g.k, g.satisfied_at, u.ord,
                 g.succeeded - count(*) filter (where d.outcome = 'success')
                     over (partition by d.partition, d.flow_id, d.downstream)
                 + row_number() over (partition by d.partition, d.flow_id, d.downstream, d.outcome = 'success' order by u.ord) as nth
          from unnest(p_partition, p_flow, p_edge) with ordinality as u (partition, flow, edge, ord)
          join flowfabric.edge d on d.partition = u.partition and d.flow_id = u.flow and d.edge_id = u.edge
               and d.resolved_at = p_now
          join flowfabric.edge_group g on g.partition = d.partition and g.flow_id = d.flow_id and g.downstream = d.downstream) c
    join flowfabric.execution up on up.partition = c.partition and up.id = c.upstream and up.result is not null
    join flowfabric.execution x on x.partition = c.partition and x.id = c.downstream and x.completed_at is null
    where c.outcome = 'success' and c.data_passing_ref is not null
      and (c.policy = 'all_of' or (c.nth = c.k and c.satisfied_at = p_now))
    order by c.partition, c.downstream, c.ord desc
    on conflict (partition, id) do update
        set upstream = excluded.upstream, payload = excluded.payload, encoding = excluded.encoding,
            injected_at = excluded.injected_at
    returning i.partition, i.id
    )
    update flowfabric.execution e set has_inputs = true from injected i
    where e.partition = i.partition and e.id = i.id and not e.has_inputs
$$;

-- inputs_of: what upstreams pass to an execution: a result in place of its input, and results beside it.
create or replace function flowfabric.inputs_of(p_partition integer, p_id uuid) returns flowfabric.inputs
language plpgsql stable as $$
declare
    v flowfabric.inputs;
begin
    select i.payload, i.encoding into v.payload, v.encoding from flowfabric.injected_input i
    where i.partition = p_partition and i.id = p_id;
    -- Successes, but not those after the group was decided: every attempt is given the same, also while an upstream is
    -- being replayed.
    select case when count(*) > 0 then coalesce(array_agg(up.id) filter (where d.counts), '{}') end,
           array_agg(case when d.is_kept then 'completed' else up.state end) filter (where d.counts),
           array_agg(case when d.is_kept then d.result else up.result end) filter (where d.counts),
           array_agg(case when d.is_kept then d.encoding else up.result_encoding end) filter (where d.counts)
    into v.upstreams, v.states, v.results, v.encodings
    from (select distinct on (x.upstream) x.upstream, coalesce(x.outcome = 'success' and x.is_in_time, false) as counts,
                 x.is_kept, x.kept_result as result, x.kept_encoding as encoding
          from flowfabric.edge x
          where x.partition = p_partition and x.downstream = p_id and x.passes
          order by x.upstream, coalesce(x.outcome = 'success' and x.is_in_time, false) desc) d
    join flowfabric.execution up on up.partition = p_partition and up.id = d.upstream;
    return v;
end;
$$;

-- release_members: waiting_children -> waiting (resumable after a suspension, delayed while a delay lasts, held back
-- again where somebody had held it back).
--
-- Called under the locks of the executions and of their routes. What is in another state is left alone.
create or replace function flowfabric.release_members(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_routes integer[]; v_ranks integer[]; v_created timestamptz[]; v_ids uuid[];
    v_late_partitions integer[]; v_late_ids uuid[]; v_late_due timestamptz[];
    v_held_partitions integer[]; v_held_ids uuid[]; v_reasons text[];
begin
    with released as (
        update flowfabric.execution e
        set state = case when e.delay_until > p_now then 'delayed' when e.resume_pending then 'resumable' else 'waiting' end,
            blocking_reason = case when e.delay_until > p_now and e.pending = 'retry' then 'waiting_for_retry_backoff'
                                   when e.delay_until > p_now and e.resume_pending then 'waiting_for_resume_delay'
                                   when e.delay_until > p_now then 'waiting_for_delay' else 'waiting_for_worker' end,
            blocking_detail = case when e.delay_until > p_now then 'delayed until '
                || to_char(e.delay_until at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') end,
            delay_until = case when e.delay_until > p_now then e.delay_until end,
            transitioned_at = p_now, mutated_at = p_now
        from unnest(p_partition, p_id) as u (partition, id)
        where e.partition = u.partition and e.id = u.id and e.state = 'waiting_children'
        returning e.partition, e.id, e.route, e.priority, e.created_at, e.deadline_at, e.delay_until, e.flow_id, e.held_back
    ), offered as (
        insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at)
        select r.route, 9000 - r.priority, r.created_at, r.id, r.partition, r.deadline_at
        from released r where r.delay_until is null
    ), touched as (
        insert into flowfabric.flow_touched select distinct r.partition, r.flow_id from released r
    )
    select array_agg(r.route) filter (where r.delay_until is null),
           array_agg(9000 - r.priority) filter (where r.delay_until is null),
           array_agg(r.created_at) filter (where r.delay_until is null), array_agg(r.id) filter (where r.delay_until is null),
           array_agg(r.partition) filter (where r.delay_until is not null),
           array_agg(r.id) filter (where r.delay_until is not null),
           array_agg(r.delay_until) filter (where r.delay_until is not null),
           array_agg(r.partition) filter (where r.held_back is not null),
           array_agg(r.id) filter (where r.held_back is not null), array_agg(r.held_back) filter (where r.held_back is not null)
    into v_routes, v_ranks, v_created, v_ids, v_late_partitions, v_late_ids, v_late_due, v_held_partitions, v_held_ids, v_reasons
    from released r;
    if v_ids is not null then
        perform flowfabric.hold_routes(v_routes);
        perform flowfabric.lower_floor(v_routes, v_ranks, v_created, v_ids);
        perform flowfabric.wake_workers();
    end if;
    perform flowfabric.set_timers('delay', v_late_partitions, v_late_ids, v_late_due);
    -- Whoever held one of them back before has not let it go.
    for i in 1 .. coalesce(cardinality(v_held_ids), 0) loop
        perform flowfabric.block(v_held_partitions[i], v_held_ids[i], v_reasons[i], null);
        update flowfabric.execution e set held_back = null where e.partition = v_held_partitions[i] and e.id = v_held_ids[i];
    end loop;
end;
$$;

-- gate: executions have become runnable; members of flows may have to be held back
--
-- Called under the locks of the executions. Who is owed a cancel by its flow is frozen, who has a dependency that is not
-- satisfied is blocked. The summaries of their flows are to be counted again.
-- Answers  the others.
create or replace function flowfabric.gate(
    p_partition integer[], p_id uuid[], out partitions integer[], out ids uuid[])
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[]; v_owed boolean[]; v_details text[];
begin
    partitions := p_partition; ids := p_id;
    insert into flowfabric.flow_touched
    select distinct e.partition, e.flow_id from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id where e.flow_id is not null;
    if not found then
        return;
    end if;
    select array_agg(e.partition), array_agg(e.id), array_agg(c.id is not null),
           array_agg(g.n - g.succeeded - g.failed - g.skipped || ' dep(s) unresolved')
    into v_partitions, v_ids, v_owed, v_details
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    left join flowfabric.cancel_member c on c.partition = e.partition and c.id = e.id
    left join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
    where c.id is not null or (g.n > 0 and g.state = 'pending' and e.state not in ('active', 'waiting_children'));
    if v_ids is null then
        return;
    end if;
    perform flowfabric.freeze_members(array_agg(u.partition), array_agg(u.id), flowfabric.now())
    from unnest(v_partitions, v_ids, v_owed) as u (partition, id, owed) where u.owed having count(*) > 0;
    perform flowfabric.block_members(array_agg(u.partition), array_agg(u.id), array_agg(u.detail), flowfabric.now())
    from unnest(v_partitions, v_ids, v_owed, v_details) as u (partition, id, owed, detail)
    where not u.owed having count(*) > 0;
    select array_agg(u.partition), array_agg(u.id) into partitions, ids
    from unnest(p_partition, p_id) as u (partition, id) where u.id <> all (v_ids);
end;
$$;

-- skip_members: anything that has not ended -> skipped, because a dependency cannot be satisfied any more.
--
-- Called under the locks of the executions. Who is owed a cancel by its flow will be cancelled instead.
create or replace function flowfabric.skip_members(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    perform flowfabric.end_executions(
        array_agg(e.partition), array_agg(e.id), null, 'skipped', 'ended_cancelled', 'skipped', null, null, null, null,
        null, null, 'dependency_impossible', 'backend', false, p_now)
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.completed_at is null
    where not exists (select from flowfabric.cancel_member c where c.partition = e.partition and c.id = e.id)
    having count(*) > 0;
end;
$$;

-- block_members: runnable -> waiting_children, because a dependency is not satisfied.
--
-- Called under the locks of the executions. What is in somebody's hands, suspended or ended is left alone. A delay is
-- kept, and so is that it was held back by somebody; a parked execution goes on when it is released, and parks again if it still has to.
create or replace function flowfabric.block_members(
    p_partition integer[], p_id uuid[], p_detail text[], p_now timestamptz) returns void
language plpgsql as $$
begin
    perform flowfabric.drop_ready(p_partition, p_id);
    delete from flowfabric.blocked b
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where b.blocking_reason = e.blocking_reason and b.created_at = e.created_at and b.id = e.id and b.partition = e.partition;
    with blocked as (
        update flowfabric.execution e
        set state = 'waiting_children', blocking_reason = 'waiting_for_children', blocking_detail = u.detail,
            held_back = case when e.blocking_reason in ('paused_by_operator', 'paused_by_policy', 'waiting_for_budget',
                                                        'waiting_for_quota') then e.blocking_reason else e.held_back end,
            delay_until = case when e.delay_until >= flowfabric.far_date() or exists (
                select from flowfabric.waiter w where w.partition = e.partition and w.id = e.id) then null
                else e.delay_until end,
            transitioned_at = p_now, mutated_at = p_now
        from unnest(p_partition, p_id, p_detail) as u (partition, id, detail)
        where e.partition = u.partition and e.id = u.id
          and e.state in ('waiting', 'delayed', 'rate_limited', 'resumable', 'waiting_children')
        returning e.partition, e.flow_id
    )
    insert into flowfabric.flow_touched select distinct b.partition, b.flow_id from blocked b where b.flow_id is not null;
    perform flowfabric.forget_waits(p_partition, p_id);
end;
$$;

-- enqueue_siblings: upstreams of decided groups that have not ended are to be cancelled.
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
        where d.partition = u.partition and d.downstream = u.downstream and d.flow_id = u.flow
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
