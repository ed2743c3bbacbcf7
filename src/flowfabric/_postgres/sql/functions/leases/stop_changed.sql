-- stop_changed: active -> waiting for other code, because the code that runs it does not fit its recorded steps
--
-- Called by the lease holder, before the first effect of the changed code. The same attempt continues; no attempt, retry or
-- reclaim is counted. Workers with other code may claim it at once. From a time on every worker of its kind may: a minute
-- after the first stop in a row, twice as long after each further one, at most an hour.
-- Takes    the fence; p_detail: what was recorded and what was asked for instead; p_digest: of the code.
-- Locks    the execution.
-- Returns  one verdict: ok and that time, or the reason it was refused.
-- Roles    work, operate
create or replace function flowfabric.stop_changed(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_detail text,
    p_digest text)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_held flowfabric.verdict;
    v_slot smallint;
    v_stops integer := 1;
    v_digests text[] := array[p_digest];
    v_until timestamptz;
    e flowfabric.execution;
begin
    perform flowfabric.require_read_committed();
    if coalesce(octet_length(p_digest), 0) not between 1 and 256 or octet_length(p_detail) > 4096 then
        raise exception 'the digest or the detail is out of bounds' using errcode = 'invalid_parameter_value';
    end if;
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    if e.stop_epoch = e.epoch - 1 then   -- the lease before ended in the same way
        v_stops := e.stops + 1;
        v_digests := array_remove(e.stop_digests, p_digest) || p_digest;
        v_digests := v_digests[greatest(1, cardinality(v_digests) - 15):];
    end if;
    v_until := v_held.at + interval '1 minute' * least(60, 2 ^ least(v_stops - 1, 6));
    v_slot := flowfabric.open_log(v_held.at);
    perform flowfabric.mark_stray(array[p_partition], array[p_id]);
    with stopped as (
        update flowfabric.execution x
        set state = 'waiting', pending = 'interrupted', blocking_reason = 'waiting_for_capable_worker',
            blocking_detail = coalesce(nullif(p_detail, ''), 'its recorded steps do not fit the code'),
            delay_until = v_until, stops = v_stops, stop_epoch = x.epoch, stop_digests = v_digests,
            stop_route = flowfabric.derive_route(
                coalesce(x.pinned, x.route), null, array(select d from unnest(v_digests) as d order by d collate "C")),
            attempt_suspended_at = v_held.at,
            attempt_timeout_left = case when x.attempt_timeout_at is not null
                then greatest(x.attempt_timeout_at - v_held.at, interval '1 millisecond') end,
            attempt_timeout_at = null, transitioned_at = v_held.at, mutated_at = null
        where x.partition = p_partition and x.id = p_id
        returning x.*
    ), listed as (
        insert into flowfabric.blocked (blocking_reason, created_at, id, partition)
        select s.blocking_reason, s.created_at, s.id, s.partition from stopped s
    )
    insert into flowfabric.event
        (slot, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker, reason, revoked_by)
    select v_slot, v_held.at, s.partition, s.id, s.flow_id, s.namespace, s.tags, 'revoked', s.lease_id, s.epoch,
           s.attempt_id, s.attempt_index, s.worker, 'steps_changed', 'backend'
    from stopped s;
    if e.limits is not null then
        perform flowfabric.give_slots(array[p_partition], array[p_id], false, v_held.at);
    end if;
    perform flowfabric.set_timers('delay', array[p_partition], array[p_id], array[v_until]);
    if e.has_reserved then
        perform flowfabric.end_reservations(array[p_partition], array[p_id], false, v_held.at);
    end if;
    perform flowfabric.make_ready(array[p_partition], array[p_id], null);   -- a member of a flow may be held back instead
    return query
    select 1, 'ok', null::text, x.state, null::bigint, null::uuid, v_until
    from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
end;
$$;

-- open_stopped: every worker of its kind may claim an execution again that changed code stopped.
--
-- Called under the locks of the executions, when their time is due or an operator unblocks one.
create or replace function flowfabric.open_stopped(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
    perform flowfabric.drop_ready(p_partition, p_id);
    update flowfabric.execution e set stop_route = null, delay_until = null, mutated_at = p_now
    from unnest(p_partition, p_id) as u (partition, id)
    where e.partition = u.partition and e.id = u.id;
    perform flowfabric.make_ready(p_partition, p_id, null);
end;
$$;

-- is_stopped: whether changed code stopped an execution, and no worker has claimed it since.
create or replace function flowfabric.is_stopped(e flowfabric.execution) returns boolean
language sql immutable as $$
    select e.state = 'waiting' and e.blocking_reason = 'waiting_for_capable_worker' and coalesce(e.stop_epoch = e.epoch, false)
$$;
