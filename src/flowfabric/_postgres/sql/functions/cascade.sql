-- The cascade: from the end of an execution to the executions that wait for it. One hop per transaction.

-- cascade: resolve the outgoing edges of ended executions, at most p_limit of them.
--
-- Takes    per end: the execution, which run of it ended, how, the event, and where to go on (null: from the start).
-- Answers  per end, in order: how many edges were seen, whether all of them were resolved, and if not, the first
--          downstream that is still to be done.
create or replace function flowfabric.cascade(
    p_partition integer[], p_id uuid[], p_run integer[], p_outcome text[], p_event bigint[], p_after uuid[],
    p_limit integer, p_now timestamptz, out resolved integer[], out done boolean[], out next uuid[])
language plpgsql as $$
declare
    v_ord integer[]; v_partition integer[]; v_flow uuid[]; v_edge uuid[]; v_downstream uuid[]; v_outcome text[];
    v_event bigint[];
    v_left integer[] := '{}';
    v_last integer;          -- the last end whose edges were looked at, when the limit was reached
    v_next uuid;
    v_no integer; v_place integer;
begin
    select array_agg(c.ord), array_agg(c.partition), array_agg(c.flow_id), array_agg(c.edge_id),
           array_agg(c.downstream), array_agg(c.outcome), array_agg(c.event)
    into v_ord, v_partition, v_flow, v_edge, v_downstream, v_outcome, v_event
    from (select u.ord::integer as ord, u.partition, d.flow_id, d.edge_id, d.downstream, u.outcome, u.event
          from unnest(p_partition, p_id, p_run, p_outcome, p_event, p_after)
               with ordinality as u (partition, id, run, outcome, event, after, ord)
          cross join lateral (
              select x.flow_id, x.edge_id, x.downstream from flowfabric.edge x
              where x.partition = u.partition and x.upstream = u.id
                and x.downstream >= coalesce(u.after, '00000000-0000-0000-0000-000000000000'::uuid)
                and x.applied_at is not null and x.outcome is null and x.from_run <= u.run
              order by x.downstream limit p_limit + 1) d
          limit p_limit + 1) c;
    if v_ord is null then
        select array_agg(0), array_agg(true), array_agg(null::uuid) into resolved, done, next from unnest(p_id);
        return;
    end if;
    if cardinality(v_ord) > p_limit then
        -- One more than may be done: it tells where the next call goes on.
        v_last := v_ord[p_limit + 1];
        v_next := v_downstream[p_limit + 1];
        v_ord := v_ord[:p_limit]; v_partition := v_partition[:p_limit]; v_flow := v_flow[:p_limit];
        v_edge := v_edge[:p_limit]; v_downstream := v_downstream[:p_limit]; v_outcome := v_outcome[:p_limit];
        v_event := v_event[:p_limit];
    end if;
    v_left := flowfabric.resolve_edges(v_partition, v_flow, v_edge, v_downstream, v_outcome, v_event, p_now);
    resolved := array_fill(0, array[cardinality(p_id)]);
    done := array_fill(true, array[cardinality(p_id)]);
    next := array_fill(null::uuid, array[cardinality(p_id)]);
    foreach v_no in array v_ord loop
        resolved[v_no] := resolved[v_no] + 1;
    end loop;
    for i in coalesce(v_last, cardinality(p_id) + 1) .. cardinality(p_id) loop
        done[i] := false;
    end loop;
    if v_last is not null then
        next[v_last] := v_next;
    end if;
    foreach v_place in array v_left loop
        v_no := v_ord[v_place];
        resolved[v_no] := resolved[v_no] - 1;
        done[v_no] := false;
        next[v_no] := least(next[v_no], v_downstream[v_place]);
    end loop;
end;
$$;

-- cascade_ended: what an end means for others, as far as it can be done at once.
--
-- Called by end_executions for members of flows. Resolves one hop, and never waits; the rest, and everything behind
-- what was skipped, is left to the dispatcher.
create or replace function flowfabric.cascade_ended(
    p_partition integer[], p_id uuid[], p_flow uuid[], p_run integer[], p_event bigint[], p_state text, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_done boolean[];
begin
    insert into flowfabric.flow_touched
    select distinct u.partition, u.flow from unnest(p_partition, p_flow) as u (partition, flow);
    -- A snapshot older than the locks may not show an edge that was applied: then the dispatcher looks.
    if p_state <> 'skipped' and current_setting('transaction_isolation') = 'read committed' then
        select c.done into v_done
        from flowfabric.cascade(
            p_partition, p_id, p_run, array_fill(flowfabric.outcome_of(p_state), array[cardinality(p_id)]), p_event,
            array_fill(null::uuid, array[cardinality(p_id)]), greatest(500, cardinality(p_id)), p_now) c;
        if false <> all (v_done) then
            return;
        end if;
    end if;
    insert into flowfabric.pending_cascade (seq, partition, id, flow_id, run, outcome, enqueued_at)
    select u.event, u.partition, u.id, u.flow, u.run, flowfabric.outcome_of(p_state), p_now
    from unnest(p_event, p_partition, p_id, p_flow, p_run, v_done) as u (event, partition, id, flow, run, done)
    where u.done is not true
      and (v_done is not null or current_setting('transaction_isolation') <> 'read committed' or exists (
          select from flowfabric.edge d where d.partition = u.partition and d.upstream = u.id and d.applied_at is not null
            and d.outcome is null and d.from_run <= u.run));
    if found then
        perform flowfabric.wake_duties(p_now);
    end if;
end;
$$;

-- dispatch_cascades: one chunk of what ends have left to do.
--
-- A chunk that fails as a whole is redone one by one; what fails alone stays, and is passed over with p_after.
-- Takes    how many events and edges; the event to go on behind; whose executions; p_event: this event alone.
-- Locks    pending rows, groups, downstreams; never waits.
-- Answers  how many ends were looked at and finished, how many edges resolved, what failed, whether there may be more.
create or replace function flowfabric.dispatch_cascades(
    p_limit integer, p_edges integer, p_after bigint, p_event bigint, p_stale_ms bigint,
    p_namespace text, p_tag_key text, p_tag_value text)
returns table (seen integer, finished integer, resolved integer, failed integer, message text, more boolean, last_event bigint)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_seq bigint[]; v_partition integer[]; v_id uuid[]; v_run integer[]; v_outcome text[]; v_after uuid[];
    v_done boolean[]; v_next uuid[]; v_resolved integer[];
    v_one_done boolean; v_one_next uuid; v_one_resolved integer;
begin
    perform flowfabric.require_read_committed();
    -- Nothing is lost: what was not written is found pending again.
    perform set_config('synchronous_commit', 'off', true);
    with taken as materialized (
        select p.* from flowfabric.pending_cascade p
        where p.seq > coalesce(p_after, 0) and (p_event is null or p.seq = p_event)
          and (p_stale_ms is null or p.enqueued_at <= flowfabric.now() - flowfabric.ms(p_stale_ms))
          and ((p_namespace is null and p_tag_key is null)
               or exists (select from flowfabric.execution e where e.partition = p.partition and e.id = p.id
                          and (p_namespace is null or e.namespace = p_namespace)
                          and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))))
        order by p.seq limit p_limit
        for update skip locked
    )
    select array_agg(t.seq order by t.seq), array_agg(t.partition order by t.seq), array_agg(t.id order by t.seq),
           array_agg(t.run order by t.seq), array_agg(t.outcome order by t.seq), array_agg(t.after order by t.seq)
    into v_seq, v_partition, v_id, v_run, v_outcome, v_after
    -- Of an execution that ended twice the first end counts first; the other is for the next call.
    from (select x.*, row_number() over (partition by x.partition, x.id order by x.seq) as nth from taken x) t where t.nth = 1;
    seen := coalesce(cardinality(v_seq), 0); finished := 0; resolved := 0; failed := 0; more := false;
    if seen = 0 then
        return next;
        return;
    end if;
    last_event := v_seq[seen];
    v_now := flowfabric.now();
    begin
        select c.resolved, c.done, c.next into v_resolved, v_done, v_next
        from flowfabric.cascade(v_partition, v_id, v_run, v_outcome, v_seq, v_after, p_edges, v_now) c;
    exception
    when serialization_failure or deadlock_detected then
        raise;
    when others then
        v_resolved := array_fill(0, array[seen]); v_done := array_fill(false, array[seen]); v_next := v_after;
        for i in 1 .. seen loop
            begin
                select c.resolved[1], c.done[1], c.next[1] into v_one_resolved, v_one_done, v_one_next
                from flowfabric.cascade(v_partition[i:i], v_id[i:i], v_run[i:i], v_outcome[i:i], v_seq[i:i], v_after[i:i],
                                        p_edges, v_now) c;
                v_resolved[i] := v_one_resolved; v_done[i] := v_one_done; v_next[i] := v_one_next;
            exception when others then
                failed := failed + 1;
                message := sqlerrm;
            end;
        end loop;
    end;
    delete from flowfabric.pending_cascade p using unnest(v_seq, v_done) as u (seq, done)
    where p.seq = u.seq and u.done;
    get diagnostics finished = row_count;
    if finished < seen then
        update flowfabric.pending_cascade p set after = u.next
        from unnest(v_seq, v_done, v_next) as u (seq, done, next)
        where p.seq = u.seq and not u.done and p.after is distinct from u.next;
    end if;
    select coalesce(sum(r), 0) into resolved from unnest(v_resolved) r;
    -- Something moved, or there may be something behind what could not be moved.
    more := finished + resolved > 0 or seen = p_limit;
    return next;
end;
$$;

-- is_pending: whether an event is still to be dispatched.
create or replace function flowfabric.cascade_pending(p_event bigint) returns boolean
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select exists (select from flowfabric.pending_cascade p where p.seq = p_event)
$$;

-- lock_group: a group and then its downstream, waiting for both; false when there is no such group.
create or replace function flowfabric.lock_group(p_partition integer, p_flow uuid, p_downstream uuid) returns boolean
language plpgsql as $$
declare
    v_found boolean;
begin
    perform 1 from flowfabric.edge_group g
    where g.partition = p_partition and g.flow_id = p_flow and g.downstream = p_downstream for update;
    v_found := found;
    perform 1 from flowfabric.execution e where e.partition = p_partition and e.id = p_downstream for no key update;
    return v_found;
end;
$$;

-- resolve_dependency: count one edge as if its upstream had ended so
--
-- Locks    the group, then the downstream.
-- Answers  satisfied, impossible, already_resolved, edge_not_found, not_applied.
create or replace function flowfabric.resolve_dependency(
    p_partition integer, p_flow uuid, p_edge uuid, p_upstream uuid, p_downstream uuid, p_outcome text) returns text
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    d flowfabric.edge;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.lock_group(p_partition, p_flow, p_downstream);
    select x.* into d from flowfabric.edge x
    where x.partition = p_partition and x.flow_id = p_flow and x.edge_id = p_edge;
    if d.edge_id is null or d.upstream <> p_upstream or d.downstream <> p_downstream then
        return 'edge_not_found';
    elsif d.applied_at is null then
        return 'not_applied';
    elsif d.outcome is not null then
        return 'already_resolved';
    end if;
    perform flowfabric.hold_routes(array_agg(e.route)) from flowfabric.execution e
    where e.partition = p_partition and e.id = p_downstream;
    perform flowfabric.resolve_edges(
        array[p_partition], array[p_flow], array[p_edge], array[p_downstream], array[p_outcome], array[null::bigint],
        flowfabric.now());
    return case p_outcome when 'success' then 'satisfied' else 'impossible' end;
end;
$$;

-- promote_blocked: release an execution whose group is satisfied and that is blocked all the same. A repair.
--
-- Locks    the group, then the execution.
-- Answers  ok, not_found, terminal, not_runnable, not_blocked_by_deps, deps_not_satisfied.
create or replace function flowfabric.promote_blocked(p_partition integer, p_id uuid) returns text
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
    e flowfabric.execution;
    v_state text;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    if e.flow_id is not null then
        perform flowfabric.lock_group(p_partition, e.flow_id, p_id);
    end if;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    if e.id is null then
        return 'not_found';
    elsif e.completed_at is not null then
        return 'terminal';
    elsif e.state in ('active', 'suspended') then
        return 'not_runnable';
    elsif e.state <> 'waiting_children' then
        return 'not_blocked_by_deps';
    end if;
    select g.state into v_state from flowfabric.edge_group g
    where g.partition = p_partition and g.flow_id = e.flow_id and g.downstream = p_id and g.n > 0;
    if v_state <> 'satisfied' then
        return 'deps_not_satisfied';
    end if;
    perform flowfabric.hold_routes(array[e.route]);
    perform flowfabric.release_members(array[p_partition], array[p_id], flowfabric.now());
    return 'ok';
end;
$$;

-- reconcile_edges: look through the groups in order for what the cascade should have done, and do it.
--
-- Finds nothing unless there is a defect. Takes a place to go on behind and answers the last one it looked at, null at
-- the end.
create or replace function flowfabric.reconcile_edges(
    p_partition integer, p_flow uuid, p_downstream uuid, p_limit integer, p_namespace text, p_tag_key text, p_tag_value text)
returns table (scanned integer, reconciled integer, partition integer, flow_id uuid, downstream uuid)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_partition integer[]; v_flow uuid[]; v_downstream uuid[]; v_state text[];
    v_edges uuid[]; v_edge_partition integer[]; v_edge_flow uuid[]; v_edge_downstream uuid[]; v_outcome text[];
    v_left integer[] := '{}';
begin
    perform flowfabric.require_read_committed();
    reconciled := 0;
    select array_agg(g.partition), array_agg(g.flow_id), array_agg(g.downstream), array_agg(g.state)
    into v_partition, v_flow, v_downstream, v_state
    from (select x.* from flowfabric.edge_group x
          where (x.partition, x.flow_id, x.downstream) > (
              coalesce(p_partition, -1), coalesce(p_flow, '00000000-0000-0000-0000-000000000000'),
              coalesce(p_downstream, '00000000-0000-0000-0000-000000000000'))
          order by x.partition, x.flow_id, x.downstream limit p_limit) g;
    scanned := coalesce(cardinality(v_flow), 0);
    if scanned = p_limit then
        partition := v_partition[scanned]; flow_id := v_flow[scanned]; downstream := v_downstream[scanned];
    end if;
    -- Applied and unresolved, though the upstream has ended in a run that counts, and nobody has it on a list.
    select array_agg(d.edge_id), array_agg(d.partition), array_agg(d.flow_id), array_agg(d.downstream),
           array_agg(flowfabric.outcome_of(up.state))
    into v_edges, v_edge_partition, v_edge_flow, v_edge_downstream, v_outcome
    from unnest(v_partition, v_flow, v_downstream) as u (partition, flow, downstream)
    join flowfabric.edge d on d.partition = u.partition and d.downstream = u.downstream and d.flow_id = u.flow
    join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream
    where d.applied_at is not null and d.outcome is null and up.completed_at is not null and d.from_run <= up.replays
      and (p_namespace is null or up.namespace = p_namespace)
      and (p_tag_key is null or coalesce(up.tags ->> p_tag_key = p_tag_value, false))
      and not exists (select from flowfabric.pending_cascade p where p.partition = up.partition and p.id = up.id);
    if v_edges is not null then
        v_left := flowfabric.resolve_edges(
            v_edge_partition, v_edge_flow, v_edges, v_edge_downstream, v_outcome,
            array_fill(null::bigint, array[cardinality(v_edges)]), v_now);
        reconciled := cardinality(v_edges) - cardinality(v_left);
    end if;
    -- Blocked, though nothing blocks it.
    for v_no in 1 .. scanned loop
        if v_state[v_no] = 'satisfied' and exists (
                select from flowfabric.execution e where e.partition = v_partition[v_no] and e.id = v_downstream[v_no]
                  and e.state = 'waiting_children' and e.flow_id = v_flow[v_no]
                  and (p_namespace is null or e.namespace = p_namespace)
                  and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false)))
           and flowfabric.promote_blocked(v_partition[v_no], v_downstream[v_no]) = 'ok' then
            reconciled := reconciled + 1;
        end if;
    end loop;
    return next;
end;
$$;
