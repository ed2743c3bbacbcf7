-- give_back: active -> waiting, delayed or waiting_children; the holder gives its lease back, and the same attempt is
-- continued later
--
-- Called by delay, release, wait_children and park, under the lock of the execution, for a caller that holds the lease. A member of a flow that has
-- an open dependency, or is owed a cancel, is held back instead (see gate).
-- Takes    p_is_parked: something else than its dependencies wakes it. p_event: the reason in the event of the lease.
-- Returns  the verdict ok, with the state it has now and p_until.
create or replace function flowfabric.give_back(
    p_partition integer, p_id uuid, p_state text, p_is_parked boolean, p_until timestamptz, p_detail text, p_event text,
    p_now timestamptz)
returns flowfabric.verdict
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
    v_given flowfabric.verdict;
    v_had_reserved boolean;
    v_limited boolean;
begin
    with paused as (
        update flowfabric.execution e
        set state = p_state, pending = 'interrupted', delay_until = p_until, is_parked = p_is_parked,
            blocking_reason = case p_state when 'delayed' then 'waiting_for_delay'
                when 'waiting_children' then 'waiting_for_children' else 'waiting_for_worker' end,
            blocking_detail = p_detail, attempt_suspended_at = p_now,
            attempt_timeout_left = case when e.attempt_timeout_at is not null
                then greatest(e.attempt_timeout_at - p_now, interval '1 millisecond') end,
            attempt_timeout_at = null, transitioned_at = p_now, mutated_at = null
        where e.partition = p_partition and e.id = p_id
        returning e.*
    ), logged as (
        insert into flowfabric.event
            (slot, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
             attempt_index, worker, reason, revoked_by)
        select v_slot, p_now, p.partition, p.id, p.flow_id, p.namespace, p.tags, 'revoked', p.lease_id, p.epoch,
               p.attempt_id, p.attempt_index, p.worker, p_event, 'backend'
        from paused p
    )
    select p.limits is not null into v_limited from paused p;
    if v_limited then
        perform flowfabric.give_slots(array[p_partition], array[p_id], false, p_now);
    end if;
    if p_state = 'waiting' then
        perform flowfabric.make_ready(array[p_partition], array[p_id], null);
    else
        if p_until is not null then
            perform flowfabric.set_timers('delay', array[p_partition], array[p_id], array[p_until]);
        end if;
        perform flowfabric.gate(array[p_partition], array[p_id]);
    end if;
    select 1, 'ok', null::text, e.state, null::bigint, null::uuid, p_until, e.has_reserved
    into v_given.ordinal, v_given.code, v_given.detail, v_given.state, v_given.lease_epoch, v_given.attempt_id, v_given.at,
         v_had_reserved
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
    if v_had_reserved then
        perform flowfabric.end_reservations(array[p_partition], array[p_id], false, p_now);
    end if;
    return v_given;
end;
$$;
