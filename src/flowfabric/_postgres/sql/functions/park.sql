-- Waiting for other executions without holding a worker.

-- park: active -> delayed until a time or until one of some executions ends
--
-- Called by the worker that holds the lease. No time means: only their end. It may also wait for signals on pending
-- waitpoints of its own: p_seen is how many it knows of on each; the next one on any of them wakes it.
-- Locks    the execution and those it waits for, by partition and id, all at once: whatever ends one of them comes
--          before (and is seen here) or after (and finds the waiter rows).
-- Answers  one verdict: ok; ok with detail 'ended', 'due' or 'signal' when there is nothing to wait for (the lease is kept);
--          or the reason it was refused.
create or replace function flowfabric.park(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_until timestamptz, p_child_partition integer[], p_child_id uuid[], p_waitpoints uuid[], p_seen integer[])
returns setof flowfabric.verdict
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
declare
    v_detail text;
    v flowfabric.verdict;
begin
    perform flowfabric.require_read_committed();
    perform 1 from unnest(p_child_partition || p_partition, p_child_id || p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    order by e.partition, e.id for no key update of e;
    v_detail := case
        when exists (select from unnest(p_child_partition, p_child_id) as u (partition, id)
                     left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
                     where e.id is null or e.completed_at is not null) then 'ended'
        when exists (select from unnest(p_waitpoints, p_seen) as u (waitpoint_id, seen)
                     left join flowfabric.waitpoint w on w.partition = p_partition and w.waitpoint_id = u.waitpoint_id
                          and w.id = p_id
                     where w.id is null or w.state <> 'pending' or w.signal_count > u.seen) then 'signal'
        when p_until <= flowfabric.now() then 'due' end;
    if v_detail is not null and exists (
            select from flowfabric.holds_lease(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index)) then
        return query select 1, 'ok', v_detail, 'active', null::bigint, null::uuid, flowfabric.now();
        return;
    end if;
    select p.* into v
    from flowfabric.pause('park', p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, p_until, null, false) p;
    if v.code = 'ok' then
        perform flowfabric.forget_waits(array[p_partition], array[p_id]);
        insert into flowfabric.waiter (partition, id, child_partition, child_id)
        select distinct p_partition, p_id, u.partition, u.id from unnest(
            p_child_partition || array_fill(p_partition, array[cardinality(p_waitpoints)]),
            p_child_id || p_waitpoints) as u (partition, id)
        on conflict do nothing;
    end if;
    if exists (select from unnest(p_child_partition, p_child_id) as u (partition, id)
               join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state = 'waiting') then
        perform flowfabric.wake_workers();   -- a claim that came meanwhile passed it over
    end if;
    return next v;
end;
$$;

-- wake_parents: executions ended; whoever is parked until then goes on.
--
-- Called by end_executions, under its locks. Never waits: a parked execution that is in somebody's hands, or whose
-- route is, gets a timer. Whoever removes waiter rows otherwise holds the lock of the execution that waits, so a row
-- that cannot be had belongs to an execution that cannot be had either.
create or replace function flowfabric.wake_parents(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
    v_free_partitions integer[]; v_free_ids uuid[];
begin
    select array_agg(d.partition), array_agg(d.id) into v_partitions, v_ids
    from (select distinct w.partition, w.id from unnest(p_partition, p_id) as u (partition, id)
          cross join lateral (select x.partition, x.id from flowfabric.waiter x
                              where x.child_partition = u.partition and x.child_id = u.id offset 0) w) d;
    if v_ids is null then
        return;
    end if;
    delete from flowfabric.waiter w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.waiter x
                            where x.child_partition = u.partition and x.child_id = u.id
                            offset 0 for update skip locked) l) consumed
    where w.ctid = consumed.tid;
    with held as materialized (
        select e.partition, e.id, e.route
        from unnest(v_partitions, v_ids) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        where flowfabric.is_parked(e)
        order by e.partition, e.id for no key update of e skip locked
    ), open as materialized (
        select r.route from (select distinct h.route from held h) r
        where pg_try_advisory_xact_lock_shared(flowfabric.ready_lock(), r.route)
    )
    select array_agg(h.partition) filter (where h.route in (select o.route from open o)),
           array_agg(h.id) filter (where h.route in (select o.route from open o))
    into v_free_partitions, v_free_ids
    from held h;
    if v_free_ids is not null then
        perform flowfabric.promote(v_free_partitions, v_free_ids, p_now);
    end if;
    -- Looked at again when it is let go of. What goes on already, or waits for a retry, needs nothing.
    perform flowfabric.set_timers('parked', array_agg(u.partition), array_agg(u.id), array_agg(p_now))
    from unnest(v_partitions, v_ids) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where flowfabric.is_parked(e) and (v_free_ids is null or u.id <> all (v_free_ids))
    having count(*) > 0;
    -- A claim that came while one was locked here passed it over.
    perform flowfabric.wake_workers();
end;
$$;

-- is_parked: waits for a time or for somebody's end, with its attempt to be continued.
create or replace function flowfabric.is_parked(e flowfabric.execution) returns boolean
language sql immutable as $$
    select e.state = 'delayed' and e.pending = 'interrupted' and e.blocking_reason = 'waiting_for_delay'
$$;

-- forget_waits: these executions wait for nobody any more.
--
-- Called under their locks. Never waits: a row that cannot be had is being consumed by the end of the one waited for.
create or replace function flowfabric.forget_waits(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.waiter w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.waiter x
                            where x.partition = u.partition and x.id = u.id
                            offset 0 for update skip locked) l) own
    where w.ctid = own.tid;
end;
$$;

-- watch: tell this process when one of these executions ends.
create or replace function flowfabric.watch(p_instance uuid, p_ms bigint, p_partition integer[], p_id uuid[]) returns void
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    insert into flowfabric.watch as w (partition, id, instance, until)
    select distinct u.partition, u.id, p_instance, clock_timestamp() + flowfabric.ms(p_ms)
    from unnest(p_partition, p_id) as u (partition, id)
    order by u.partition, u.id
    on conflict (partition, id, instance) do update set until = excluded.until
$$;

-- unwatch: never mind.
create or replace function flowfabric.unwatch(p_instance uuid, p_partition integer[], p_id uuid[]) returns void
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    delete from flowfabric.watch w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.watch x
                            where x.partition = u.partition and x.id = u.id and x.instance = p_instance
                            offset 0 for update skip locked) l) mine
    where w.ctid = mine.tid
$$;

-- tell_watchers: executions ended; one notification per process that watches any of them.
--
-- Never waits: a row that its watcher is just renewing is told of and stays until its time is over.
create or replace function flowfabric.tell_watchers(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    perform pg_notify('flowfabric', 'ended ' || d.instance)
    from (select distinct w.instance from unnest(p_partition, p_id) as u (partition, id)
          cross join lateral (select x.instance, x.until from flowfabric.watch x
                              where x.partition = u.partition and x.id = u.id offset 0) w
          where w.until > clock_timestamp()) d;
    delete from flowfabric.watch w using (
        select l.tid from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid from flowfabric.watch x
                            where x.partition = u.partition and x.id = u.id
                            offset 0 for update skip locked) l) told
    where w.ctid = told.tid;
end;
$$;

-- tell_holders: leases were taken away by somebody else; one notification per worker that held any of them.
create or replace function flowfabric.tell_holders(p_partition integer[], p_id uuid[]) returns void
language sql volatile as $$
    select pg_notify('flowfabric', 'lost ' || d.worker_instance_id)
    from (select distinct e.worker_instance_id from unnest(p_partition, p_id) as u (partition, id)
          join flowfabric.execution e on e.partition = u.partition and e.id = u.id
          where e.state = 'active') d
$$;

-- read_outcomes: how executions ended; no row for those that have not. A missing one has no state.
create or replace function flowfabric.read_outcomes(p_partition integer[], p_id uuid[])
returns table (ordinal integer, state text, result bytea, result_encoding text, failure_reason text,
               failure_category text, cancellation_reason text)
language sql stable security definer set search_path = flowfabric, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
    select u.ord::integer, e.state, e.result, e.result_encoding, e.failure_reason, e.failure_category, e.cancellation_reason
    from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
    left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where e.id is null or e.completed_at is not null
$$;
