-- pause: active -> delayed or waiting, the same attempt to be continued later
--
-- Calls of a lease holder that give the lease back without ending the attempt:
--   delay          until a time
--   park           until a time, if one is given, or until it is woken (see park.sql)
--   wait_children  until its dependencies are satisfied; if they are, it may be claimed at once
--   release        for another worker, at once
-- Locks    for wait_children the execution's group; the execution.
-- Returns  one verdict: ok, or the reason it was refused.
create or replace function flowfabric.pause(
    p_call text, p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_delay_until timestamptz, p_delay_ms bigint, p_operator boolean)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_held flowfabric.verdict;
    v_slot smallint;
    v_until timestamptz;
    v_state text := case when p_call in ('delay', 'park') then 'delayed' else 'waiting' end;
    v_group text;
begin
    if p_call not in ('delay', 'park', 'wait_children', 'release') then
        raise exception 'unknown call %', p_call using errcode = 'FF001';
    end if;
    if p_call = 'wait_children' then
        perform flowfabric.require_read_committed();
        select g.state into v_group from flowfabric.execution e
        join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
        where e.partition = p_partition and e.id = p_id and g.n > 0 for update of g;
        if v_group <> 'satisfied' then
            v_state := 'waiting_children';
        end if;
    end if;
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, p_operator);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    v_now := v_held.at;
    v_slot := flowfabric.open_log(v_now);
    v_until := case when v_state = 'delayed'
                    then coalesce(p_delay_until, v_now + flowfabric.ms(p_delay_ms), flowfabric.far_date()) end;
    with paused as (
        update flowfabric.execution e
        set state = v_state, pending = 'interrupted', delay_until = v_until,
            blocking_reason = case v_state when 'delayed' then 'waiting_for_delay'
                when 'waiting_children' then 'waiting_for_children' else 'waiting_for_worker' end,
            blocking_detail = case
                when v_state = 'waiting_children' then 'waiting for child executions to complete'
                when v_until < flowfabric.far_date() then 'delayed until '
                    || to_char(v_until at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
                when p_call = 'park' then 'waiting for another execution'
                when v_state = 'delayed' then 'delayed for ever' end,
            attempt_lifecycle = 'suspended', attempt_suspended_at = v_now,
            attempt_timeout_left = case when e.attempt_timeout_at is not null
                then greatest(e.attempt_timeout_at - v_now, interval '1 millisecond') end,
            attempt_timeout_at = null, transitioned_at = v_now, mutated_at = v_now
        where e.partition = p_partition and e.id = p_id
        returning e.*
    )
    insert into flowfabric.event
        (slot, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker_id, worker_instance_id, reason, revoked_by)
    select v_slot, v_now, p.partition, p.id, p.flow_id, p.namespace, p.tags, 'revoked', p.lease_id, p.epoch,
           p.attempt_id, p.attempt_index, p.worker_id, p.worker_instance_id,
           case p_call when 'delay' then 'worker_delay' when 'park' then 'worker_park' when 'release' then 'worker_release'
                       else 'waiting_children' end, 'backend'
    from paused p;
    if v_state = 'waiting' then
        perform flowfabric.make_ready(array[p_partition], array[p_id], null);
    else
        if v_state = 'delayed' then
            perform flowfabric.set_timers('delay', array[p_partition], array[p_id], array[v_until]);
        end if;
        perform flowfabric.gate(array[p_partition], array[p_id]);
    end if;
    return query
    select 1, 'ok', null::text, e.state, null::bigint, null::uuid, v_until
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
end;
$$;
