-- The ordered lease check (P1) that every call of a lease holder passes, and the marks of a lost lease.

-- lock_holders: lock the executions of a call and tell which items hold a live lease.
--
-- Takes    per item the fence (lease, epoch, attempt) and optionally the attempt index; a null lease is an operator's
--          call, which skips the comparison of the fence and nothing else.
-- Locks    the executions, by partition and id.
-- Answers  the time, read once all locks are held, and the ordinals that pass with the places of their rows, in the
--          order of the ordinals. The others go to refuse_holders.
create or replace function flowfabric.lock_holders(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_operator boolean, out at timestamptz, out ok integer[], out tids tid[])
language plpgsql as $$
declare
    v_first timestamptz;
begin
    -- Every row is locked, also those that do not hold: materialized, so that the filter stays above the locks.
    with q as materialized (
        select u.ord::integer as ord, e.ctid as tid, e.lease_expires_at,
               e.state = 'active' and e.lease_lost is null
               and ((e.lease_id = u.lease and e.epoch = u.epoch and e.attempt_id = u.attempt)
                    or (p_operator and u.lease is null and u.epoch is null and u.attempt is null))
               and (u.idx is null or u.idx = e.attempt_index) as holds
        from unnest(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) with ordinality
             as u (partition, id, lease, epoch, attempt, idx, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        order by e.partition, e.id
        for no key update of e
    )
    select array_agg(q.ord order by q.ord), array_agg(q.tid order by q.ord), min(q.lease_expires_at)
    into ok, tids, v_first
    from q where q.holds;
    at := flowfabric.now();
    if v_first <= at then
        select array_agg(h.o order by h.o), array_agg(h.tid order by h.o) into ok, tids
        from unnest(ok, tids) as h (o, tid)
        join flowfabric.execution e on e.ctid = h.tid and e.lease_expires_at > at;
    end if;
    ok := coalesce(ok, '{}');
end;
$$;

-- refuse_holders: why the other items of a holder's call were refused, in the order of checks that is contract.
--
-- Called under the locks of lock_holders. A lapsed lease that it meets is marked expired, and that stays.
-- Answers  one verdict per refused item; a repeated terminal call is answered 'replayed' (p_replays names the call).
create or replace function flowfabric.refuse_holders(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_operator boolean, p_replays text, p_ok integer[], p_now timestamptz)
returns setof flowfabric.verdict
language plpgsql as $$
declare
    v_ord integer;
    e flowfabric.execution;
    a record;
    v flowfabric.verdict;
begin
    for v_ord in select o from generate_subscripts(p_id, 1) o where o <> all (p_ok) loop
        v := row(v_ord, null, null, null, null, null, null)::flowfabric.verdict;
        select x.* into e from flowfabric.execution x where x.partition = p_partition[v_ord] and x.id = p_id[v_ord];
        v.state := e.state; v.lease_epoch := e.epoch;
        v.attempt_id := case when e.pending = 'retry' then null else e.attempt_id end;
        if num_nulls(p_lease[v_ord], p_epoch[v_ord], p_attempt[v_ord]) between 1 and 2 then
            v.code := 'invalid_input'; v.detail := 'partial_fence_triple';
        elsif e.id is null then
            v.code := 'not_found';
        elsif p_lease[v_ord] is null and not p_operator then
            v.code := 'invalid_input'; v.detail := 'fence_required';
        else
            if p_replays is not null and p_lease[v_ord] is not null then
                select h.disposition, h.retry_at into a
                from flowfabric.attempts_of(e.partition, e.id) h
                where h.attempt_id = p_attempt[v_ord] and h.lease_id = p_lease[v_ord] and h.lease_epoch = p_epoch[v_ord]
                  and (p_index[v_ord] is null or h.attempt_index = p_index[v_ord]);
                if found and (a.disposition = p_replays
                              or (p_replays = 'failed' and a.disposition in ('retry_scheduled', 'terminal_failed'))) then
                    v.code := 'replayed'; v.detail := a.disposition; v.at := a.retry_at;
                    return next v;
                    continue;
                end if;
            end if;
            if e.state <> 'active' then
                v.code := 'execution_not_active';
            elsif e.lease_lost = 'revoked' then
                v.code := 'lease_revoked';
            elsif e.lease_lost = 'expired' or e.lease_expires_at <= p_now then
                if e.lease_lost is null then
                    perform flowfabric.mark_expired(array[e.partition], array[e.id], p_now);
                end if;
                v.code := 'lease_expired';
            else
                v.code := 'stale_lease';
            end if;
        end if;
        return next v;
    end loop;
end;
$$;

-- mark_expired: active and leased -> active with a lapsed lease, which any worker may reclaim (P3).
--
-- The caller holds the locks and has checked that the leases lapsed.
create or replace function flowfabric.mark_expired(p_partition integer[], p_id uuid[], p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
begin
    with lost as (
        update flowfabric.execution e
        set lease_lost = 'expired', lease_lost_at = p_now, blocking_reason = 'waiting_for_worker',
            blocking_detail = 'lease expired, awaiting reclaim', pending = 'interrupted',
            transitioned_at = p_now, mutated_at = p_now
        from unnest(p_partition, p_id) as u (partition, id)
        where e.partition = u.partition and e.id = u.id
        returning e.*
    )
    insert into flowfabric.event
        (slot, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker_id, worker_instance_id, reason)
    select v_slot, p_now, l.partition, l.id, l.flow_id, l.namespace, l.tags, 'expired',
           l.lease_id, l.epoch, l.attempt_id, l.attempt_index, l.worker_id, l.worker_instance_id, 'lease_expired'
    from lost l;
    perform flowfabric.offer_lost(p_partition, p_id);
end;
$$;

-- offer_lost: put executions whose lease was lost where claims find them.
create or replace function flowfabric.offer_lost(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
declare
    v record;
begin
    for v in
        select case when e.lease_lost = 'expired' then e.lease_expires_at else e.lease_lost_at end + d.reclaim_grace as at,
               array_agg(e.partition) as partitions, array_agg(e.id) as ids
        from flowfabric.deployment d, unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        group by 1
    loop
        perform flowfabric.make_ready(v.partitions, v.ids, v.at);
    end loop;
end;
$$;

-- attempts_of: every attempt of one execution, the history and the latest.
create or replace function flowfabric.attempts_of(p_partition integer, p_id uuid)
returns setof flowfabric.attempt
language sql stable as $$
    select a.* from flowfabric.attempt a where a.partition = p_partition and a.id = p_id
    union all
    select (flowfabric.latest_attempt(e)).* from flowfabric.execution e
    where e.partition = p_partition and e.id = p_id and e.attempts > 0
$$;

create or replace function flowfabric.latest_attempt(e flowfabric.execution) returns flowfabric.attempt
language sql immutable as $$
    select row(e.partition, e.id, e.attempt_index, e.attempt_id, e.attempt_type, e.attempt_lifecycle,
               e.attempt_started_at, e.attempt_resumed_at, e.attempt_suspended_at, e.attempt_ended_at,
               e.lease_id, e.epoch, e.worker_id, e.worker_instance_id, e.attempt_failure_reason,
               e.attempt_failure_category, e.attempt_policy, e.retry_reason, e.previous_attempt_index,
               e.replay_reason, e.replay_requested_by, e.replayed_from_attempt_index, e.reclaim_reason,
               e.disposition, e.retry_at)::flowfabric.attempt
$$;
