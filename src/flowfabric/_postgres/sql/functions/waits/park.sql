-- Waiting without holding a worker: for other executions, for a time, for signals.

-- park: active -> waiting_children, delayed or suspended, until the first of the things it waits for happens
--
--   other executions, whatever else            waiting_children   one of them ends, or anything else happens
--   else a time, perhaps with signals          delayed            the time is due, or a signal arrives
--   signals, and nothing else                  suspended          a signal arrives, or the first wait times out
-- Called by the worker that holds the lease.
-- Takes    p_until: a time. p_waitpoints: pending waitpoints of the execution, each with the number of signals that the
--          caller knows and the condition of its wait. p_deadline, p_behavior: the earliest timeout of these waits and
--          its behaviour; a suspension applies it, in the other states the execution only wakes then (an escalation
--          does not wake it). p_reason, p_suspension: of a suspension.
-- Locks    the execution and those it waits for, by partition and id, all at once: whatever ends one of them comes
--          before (and is seen here) or after (and finds the waiter rows).
-- Returns  one verdict: ok; ok with detail 'ended', 'due' or 'signal' when there is nothing to wait for (the lease is kept);
--          or the reason it was refused.
-- Roles    work, operate
create or replace function flowfabric.park(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_until timestamptz, p_child_partition integer[], p_child_id uuid[], p_waitpoints uuid[], p_seen integer[],
    p_conditions text[], p_deadline timestamptz, p_behavior text, p_reason text, p_suspension uuid)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_detail text;
    v_held flowfabric.verdict;
    v_state text := case when cardinality(p_child_id) > 0 then 'waiting_children' when p_until is not null then 'delayed'
                         else 'suspended' end;
    v_until timestamptz := least(p_until, case when p_behavior <> 'escalate' then p_deadline end);
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.check_time(v_until);
    perform 1 from unnest(p_child_partition || p_partition, p_child_id || p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    order by e.partition, e.id for no key update of e;
    v_detail := case
        when exists (select from unnest(p_child_partition, p_child_id) as u (partition, id)
                     left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
                     where e.id is null or e.completed_at is not null) then 'ended'
        when exists (select from unnest(p_waitpoints, p_seen) as u (waitpoint_id, seen)
                     left join lateral (select x.id, x.state, x.signal_count from flowfabric.waitpoint x
                                        where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id
                                          and x.id = p_id offset 0) w on true
                     where w.id is null or w.state <> 'pending' or w.signal_count > u.seen) then 'signal'
        -- A suspension that timed out may end the execution.
        when v_until <= flowfabric.now() and (v_state <> 'suspended' or p_behavior = 'auto_resume_with_timeout_signal')
            then 'due' end;
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    elsif v_detail is not null then
        return query select 1, 'ok', v_detail, 'active', null::bigint, null::uuid, v_held.at;
        return;
    end if;
    if v_state = 'suspended' then
        perform flowfabric.suspend_waits(
            p_partition, p_id, p_suspension, p_waitpoints, p_conditions, p_reason, p_deadline, p_behavior, v_held.at);
    else
        perform flowfabric.give_back(
            p_partition, p_id, v_state, true, v_until,
            (select flowfabric.waits_for(array_agg(a.id), array_agg(a.flow_id), array_agg(a.key), v_until)
             from (select c.id, case when c.flow_id is distinct from e.flow_id then c.flow_id end as flow_id, null as key
                   from unnest(p_child_partition, p_child_id) as u (partition, id)
                   join flowfabric.execution c on c.partition = u.partition and c.id = u.id
                   join flowfabric.execution e on e.partition = p_partition and e.id = p_id
                   union all
                   select null, null, w.waitpoint_key
                   from unnest(p_waitpoints) as u (waitpoint_id)
                   cross join lateral (select x.waitpoint_key from flowfabric.waitpoint x
                                       where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) w) a),
            'worker_park', v_held.at);
        perform flowfabric.forget_waits(array[p_partition], array[p_id]);
        insert into flowfabric.waiter (partition, id, awaited_partition, awaited_id)
        select distinct p_partition, p_id, u.partition, u.id from unnest(
            p_child_partition || array_fill(p_partition, array[cardinality(p_waitpoints)]),
            p_child_id || p_waitpoints) as u (partition, id)
        where exists (select from flowfabric.execution e where e.partition = p_partition and e.id = p_id and e.is_parked)
        on conflict do nothing;
    end if;
    if exists (select from unnest(p_child_partition, p_child_id) as u (partition, id)
               join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state = 'waiting') then
        perform flowfabric.wake_for(p_child_partition, p_child_id);   -- a claim that came meanwhile passed it over
    end if;
    return query
    select 1, 'ok', null::text, e.state, null::bigint, null::uuid, v_until
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
end;
$$;

-- suspend_waits: active -> suspended on the waitpoints of several waits, until the next signal on any of them
--
-- Called by park, under the lock of the execution, for a caller that holds the lease. A waitpoint that expires before the
-- deadline resumes it too. As with suspend, an execution may have a timeout by policy.
create or replace function flowfabric.suspend_waits(
    p_partition integer, p_id uuid, p_suspension uuid, p_waitpoints uuid[], p_conditions text[], p_reason text,
    p_deadline timestamptz, p_behavior text, p_now timestamptz)
returns void
language plpgsql as $$
declare
    e flowfabric.execution;
    s flowfabric.suspension;
    v_keys text[];
    v_expires timestamptz;
    v_timeout timestamptz := p_deadline;
    v_behavior text := p_behavior;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    update flowfabric.waitpoint w
    set state = 'active', suspension_id = p_suspension, activated_at = p_now,
        required_signal_names = flowfabric.required_names(u.condition::jsonb, w.waitpoint_key)
    from unnest(p_waitpoints, p_conditions) as u (waitpoint_id, condition)
    cross join lateral (select x.ctid as tid from flowfabric.waitpoint x
                        where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) f
    where w.ctid = f.tid;
    select array_agg(w.waitpoint_key order by u.place), min(w.expires_at) filter (where w.expires_at < flowfabric.far_date())
    into v_keys, v_expires
    from unnest(p_waitpoints) with ordinality as u (waitpoint_id, place)
    cross join lateral (select x.waitpoint_key, x.expires_at from flowfabric.waitpoint x
                        where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) w;
    if v_timeout is null and (e.policy -> 'suspension_policy' ->> 'default_timeout_ms') is not null then
        v_timeout := p_now + flowfabric.ms((e.policy -> 'suspension_policy' ->> 'default_timeout_ms')::bigint);
        v_behavior := coalesce(e.policy -> 'suspension_policy' ->> 'timeout_behavior', 'fail');
    end if;
    if v_expires < coalesce(v_timeout, 'infinity') then
        v_timeout := v_expires; v_behavior := 'auto_resume_with_timeout_signal';
    end if;
    insert into flowfabric.suspension
        (partition, id, number, suspension_id, attempt_index, attempt_id, lease_id, lease_epoch, waitpoint_ids,
         waitpoint_keys, reason_code, requested_by, resume_condition, resume_policy, suspended_at, timeout_at,
         timeout_behavior, is_early, keeps_waitpoints)
    select p_partition, p_id, coalesce(max(x.number), 0) + 1, p_suspension, e.attempt_index, e.attempt_id, e.lease_id, e.epoch,
           p_waitpoints, v_keys, p_reason, 'worker',
           jsonb_build_object('Composite', jsonb_build_object(
               'kind', 'Count', 'n', 1, 'count_kind', 'DistinctSignals',
               'waitpoints', (select jsonb_agg(distinct k) from unnest(v_keys) k))),
           '{}', p_now, v_timeout, v_behavior, false, true
    from flowfabric.suspension x where x.partition = p_partition and x.id = p_id
    returning * into s;
    perform flowfabric.give_up_lease(s, p_now);
end;
$$;
