-- suspend: active -> suspended, until signals satisfy a condition, an operator resumes it, or its time is over
--
-- Called by the lease holder. A binding is a fresh waitpoint (id and key given) or a pending one (no key).
-- Takes    p_only_if_satisfied: do nothing unless what has arrived satisfies the condition already.
-- Locks    the execution; waitpoints, suspensions and signals change under that lock only.
-- Answers  one row: ok with variant suspended or already_satisfied (the lease is kept), or `open` when asked for no more;
--          or the reason it was refused. A repeated call with the same key and fence gets the answer of the first.
create or replace function flowfabric.suspend(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_by_triple boolean,
    p_suspension uuid, p_waitpoints uuid[], p_keys text[], p_condition text, p_policy text, p_reason text,
    p_requested_by text, p_timeout_at timestamptz, p_behavior text, p_pointer text, p_idempotency_key text,
    p_only_if_satisfied boolean)
returns setof flowfabric.suspended
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_ok integer[];
    e flowfabric.execution;
    s flowfabric.suspension;
    w flowfabric.waitpoint;
    v_condition jsonb := p_condition::jsonb;
    v_kid text;
    v_keys text[] := p_keys;
    v_pending uuid[] := '{}';
    v_code text; v_detail text;
    v_number integer;
    v_timeout timestamptz := p_timeout_at;
    v_behavior text := p_behavior;
    v_signals flowfabric.recorded;
    v_closer integer;
    v_places integer[] := '{}';
begin
    perform flowfabric.require_read_committed();
    if p_timeout_at + interval '10 minutes' < v_now then
        return query select * from flowfabric.not_suspended('invalid_input', 'timeout_at_in_past', e);
        return;
    end if;
    select l.at, l.ok into v_now, v_ok
    from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt],
                                 array[p_index], false) l;
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    if p_idempotency_key <> '' then
        select x.* into s from flowfabric.suspension x
        where x.partition = p_partition and x.id = p_id and x.idempotency_key = p_idempotency_key
        order by x.number desc limit 1;
        if s.replay_until > v_now and (s.lease_id, s.lease_epoch, s.attempt_id) = (p_lease, p_epoch, p_attempt) then
            return query select * from flowfabric.as_suspended(s, e);
            return;
        end if;
    end if;
    if e.state = 'suspended' and not p_by_triple then
        return query select * from flowfabric.not_suspended('already_suspended', null, e);
        return;
    elsif cardinality(v_ok) = 0 then
        return query select r.code, r.detail, r.state, r.lease_epoch, r.attempt_id, null::text, null::uuid, null::uuid[],
                            null::text[], null::text[], null::integer, null::text, null::text, null::bigint
        from flowfabric.refuse_holders(
            array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt], array[p_index], false,
            null, v_ok, v_now) r;
        return;
    end if;

    -- In the order of the contract: an open suspension, fresh ids, pending ones.
    if exists (select from flowfabric.suspension x
               where x.partition = p_partition and x.id = p_id and x.closed_at is null) then
        v_code := 'already_suspended';
    elsif exists (select from unnest(p_waitpoints, p_keys) as u (waitpoint_id, key)
               join flowfabric.waitpoint x on x.partition = p_partition and x.waitpoint_id = u.waitpoint_id
               where u.key is not null) then
        v_code := 'waitpoint_already_exists';
    end if;
    for i in 1 .. cardinality(p_waitpoints) loop
        exit when v_code is not null;
        continue when p_keys[i] is not null;
        v_pending := v_pending || p_waitpoints[i];
        select x.* into w from flowfabric.waitpoint x
        where x.partition = p_partition and x.waitpoint_id = p_waitpoints[i];
        v_code := case when w.waitpoint_id is null then 'waitpoint_not_found'
                       when w.id <> p_id or w.attempt_index <> e.attempt_index then 'invalid_waitpoint_for_execution'
                       when w.state = 'expired' then 'pending_waitpoint_expired'
                       when w.state <> 'pending' then 'waitpoint_not_pending'
                       when w.expires_at <= v_now then 'pending_waitpoint_expired' end;
        if w.state = 'pending' and v_code = 'pending_waitpoint_expired' then
            perform flowfabric.expire_waitpoints(array[p_partition], array[p_id], v_now);
        end if;
        v_keys[i] := w.waitpoint_key;
    end loop;
    if v_code is null and exists (
            select from flowfabric.leaves(v_condition) l where cardinality(l.keys) > 0) and (
            select array_agg(distinct k order by k) from flowfabric.leaves(v_condition) l cross join lateral unnest(l.keys) k)
            is distinct from (select array_agg(k order by k) from unnest(v_keys) k) then
        v_code := 'invalid_input'; v_detail := 'waitpoint_key_mismatch';
    end if;
    if v_code is null and cardinality(v_pending) < cardinality(p_waitpoints) then
        v_kid := (select k.kid from flowfabric.keystore k where k.state = 'current');
        if v_kid is null then
            v_code := 'invalid_input'; v_detail := 'hmac_secret_not_initialized';
        end if;
    end if;
    if v_code is not null then
        return query select * from flowfabric.not_suspended(v_code, v_detail, e);
        return;
    end if;

    if cardinality(v_pending) > 0 then
        v_signals := flowfabric.recorded_on(p_partition, v_pending, false);
        v_closer := flowfabric.first_holding(v_condition, v_signals);
        select f.places into v_places
        from flowfabric.satisfiers(v_condition, v_signals.keys, v_signals.names, v_signals.ids, v_signals.types,
                                   v_signals.identities, coalesce(v_closer, cardinality(v_signals.ids))) f;
    end if;
    if v_closer is null and p_only_if_satisfied then
        return query select 'ok', null::text, e.state, e.epoch, e.attempt_id, 'open', null::uuid, p_waitpoints, v_keys,
                            null::text[], e.attempt_index, null::text, null::text, null::bigint;
        return;
    end if;

    if v_timeout is null and v_closer is null and (e.policy -> 'suspension_policy' ->> 'default_timeout_ms') is not null then
        v_timeout := v_now + flowfabric.ms((e.policy -> 'suspension_policy' ->> 'default_timeout_ms')::bigint);
        v_behavior := coalesce(e.policy -> 'suspension_policy' ->> 'timeout_behavior', 'fail');
    end if;
    select coalesce(max(x.number), 0) + 1 into v_number from flowfabric.suspension x
    where x.partition = p_partition and x.id = p_id;
    begin
        insert into flowfabric.waitpoint
            (partition, waitpoint_id, id, attempt_index, suspension_id, waitpoint_key, token_kid, state, outlives_attempt,
             required_signal_names, created_at, activated_at, expires_at)
        select p_partition, u.waitpoint_id, p_id, e.attempt_index, p_suspension, u.key, v_kid, 'active', false,
               flowfabric.required_names(v_condition, u.key), v_now, v_now, v_timeout
        from unnest(p_waitpoints, p_keys) as u (waitpoint_id, key) where u.key is not null
        order by u.waitpoint_id;   -- all in one order, lest two wait for each other
    exception when unique_violation then
        -- Another execution of this partition was quicker with an id of the caller's making.
        return query select * from flowfabric.not_suspended('waitpoint_already_exists', null, e);
        return;
    end;
    insert into flowfabric.suspension
        (partition, id, number, suspension_id, attempt_index, attempt_id, lease_id, lease_epoch, waitpoint_ids,
         waitpoint_keys, reason_code, requested_by, continuation_metadata_pointer, resume_condition, resume_policy,
         suspended_at, timeout_at, timeout_behavior, idempotency_key, replay_until, is_early, last_signal_at,
         satisfied_at, closed_at, close_reason, closer_signal_id, satisfier_signal_ids)
    values
        (p_partition, p_id, v_number, p_suspension, e.attempt_index, e.attempt_id, p_lease, p_epoch, p_waitpoints,
         v_keys, p_reason, p_requested_by, p_pointer, v_condition, p_policy::jsonb,
         v_now, v_timeout, v_behavior, nullif(p_idempotency_key, ''),
         case when p_idempotency_key <> '' then v_now + least(
             case when v_timeout is not null then greatest(v_timeout - v_now, interval '0') + interval '60 seconds' end,
             interval '604800 seconds') end,
         v_closer is not null, v_signals.last_at, case when v_closer is not null then v_now end,
         case when v_closer is not null then v_now end, case when v_closer is not null then 'resumed' end,
         v_signals.ids[v_closer], (select array_agg(v_signals.ids[p] order by p) from unnest(v_places) p where v_closer is not null))
    returning * into s;
    if cardinality(v_pending) > 0 then
        update flowfabric.signal g
        set suspension_id = p_suspension,
            observed_effect = case when u.place = v_closer then 'resume_condition_satisfied' else 'appended_to_waitpoint' end,
            match_detail = flowfabric.match_detail(v_condition, g.waitpoint_key, g.signal_name, u.place = any (v_places))
        from unnest(v_signals.ordinals) with ordinality as u (ordinal, place)
        where g.partition = p_partition and g.id = p_id and g.ordinal = u.ordinal;
        update flowfabric.waitpoint x
        set state = case when v_closer is null then 'active' else 'closed' end, suspension_id = p_suspension,
            activated_at = v_now, expires_at = v_timeout,
            required_signal_names = flowfabric.required_names(v_condition, x.waitpoint_key),
            matched_signal_count = (select count(*) from flowfabric.signal g where g.partition = p_partition
                                    and g.waitpoint_id = x.waitpoint_id and g.match_detail = 'advanced'),
            satisfied_at = case when v_closer is not null then v_now end,
            closed_at = case when v_closer is not null then v_now end,
            close_reason = case when v_closer is not null then 'resumed' end
        where x.partition = p_partition and x.waitpoint_id = any (v_pending);
    end if;
    if v_closer is not null then
        perform flowfabric.remember_wait(p_partition, p_id, s.waitpoint_ids, 'resumed', s.satisfier_signal_ids);
    else
        perform flowfabric.give_up_lease(s, v_now);
        select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    end if;
    return query select * from flowfabric.as_suspended(s, e);
end;
$$;

-- give_up_lease: the execution of a suspension that was just written stops being anybody's.
create or replace function flowfabric.give_up_lease(s flowfabric.suspension, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_slot smallint := flowfabric.open_log(p_now);
begin
    with paused as (
        update flowfabric.execution e
        set state = 'suspended', pending = 'interrupted', epoch = e.epoch + 1, has_waitpoints = true,
            suspension_timeout_at = s.timeout_at, blocking_reason = flowfabric.suspension_blocks(s.reason_code),
            blocking_detail = 'waitpoint ' || s.waitpoint_ids[1] || ': ' || s.reason_code,
            attempt_lifecycle = 'suspended', attempt_suspended_at = p_now,
            attempt_timeout_left = case when e.attempt_timeout_at is not null
                then greatest(e.attempt_timeout_at - p_now, interval '1 millisecond') end,
            attempt_timeout_at = null, transitioned_at = p_now, mutated_at = p_now
        where e.partition = s.partition and e.id = s.id
        returning e.*
    )
    insert into flowfabric.event
        (slot, occurred_at, partition, id, flow_id, namespace, tags, lease_type, lease_id, lease_epoch, attempt_id,
         attempt_index, worker_id, worker_instance_id, reason, revoked_by)
    select v_slot, p_now, p.partition, p.id, p.flow_id, p.namespace, p.tags, 'revoked', p.lease_id, p.epoch - 1,
           p.attempt_id, p.attempt_index, p.worker_id, p.worker_instance_id, 'suspend', 'backend'
    from paused p;
    if s.timeout_at is not null then
        perform flowfabric.set_timers('suspension', array[s.partition], array[s.id], array[s.timeout_at]);
    end if;
    insert into flowfabric.flow_touched
    select e.partition, e.flow_id from flowfabric.execution e
    where e.partition = s.partition and e.id = s.id and e.flow_id is not null;
end;
$$;

-- suspension_blocks: the blocking reason that a reason code leads to.
create or replace function flowfabric.suspension_blocks(p_reason text) returns text
language sql immutable as $$
    select case p_reason when 'step_boundary' then 'waiting_for_signal'
                         when 'waiting_for_operator_review' then 'paused_by_operator'
                         when 'manual_pause' then 'paused_by_operator'
                         when 'paused_by_budget' then 'waiting_for_budget' else p_reason end
$$;

-- as_suspended, not_suspended: the answers of suspend.
create or replace function flowfabric.as_suspended(s flowfabric.suspension, e flowfabric.execution)
returns setof flowfabric.suspended
language sql stable as $$
    select 'ok', null::text, e.state, s.lease_epoch, s.attempt_id,
           case when s.is_early then 'already_satisfied' else 'suspended' end, s.suspension_id, s.waitpoint_ids, s.waitpoint_keys,
           (select array_agg(coalesce(flowfabric.sign_token(w.token_kid, w.partition, w.id, w.waitpoint_id), '') order by u.place)
            from unnest(s.waitpoint_ids) with ordinality as u (waitpoint_id, place)
            join flowfabric.waitpoint w on w.partition = s.partition and w.waitpoint_id = u.waitpoint_id),
           s.attempt_index, r.lane, e.worker_instance_id, e.lease_ttl_ms
    from flowfabric.route r where r.id = e.route
$$;

create or replace function flowfabric.not_suspended(p_code text, p_detail text, e flowfabric.execution)
returns setof flowfabric.suspended
language sql immutable as $$
    select p_code, p_detail, e.state, e.epoch, e.attempt_id, null::text, null::uuid, null::uuid[], null::text[], null::text[],
           null::integer, null::text, null::text, null::bigint
$$;

-- recorded_on: what has been recorded on some waitpoints, in the order of acceptance, as columns.
--
-- Takes    p_advanced: only those that added something. The others can never matter to whether a condition holds.
create or replace function flowfabric.recorded_on(p_partition integer, p_waitpoints uuid[], p_advanced boolean)
returns flowfabric.recorded
language sql stable as $$
    select row(coalesce(array_agg(g.ordinal order by g.ordinal), '{}'), coalesce(array_agg(g.waitpoint_key order by g.ordinal), '{}'),
               coalesce(array_agg(g.signal_name order by g.ordinal), '{}'), coalesce(array_agg(g.signal_id order by g.ordinal), '{}'),
               coalesce(array_agg(g.source_type order by g.ordinal), '{}'), coalesce(array_agg(g.source_identity order by g.ordinal), '{}'),
               max(g.accepted_at))::flowfabric.recorded
    from unnest(p_waitpoints) as u (waitpoint_id)
    cross join lateral (select x.* from flowfabric.signal x where x.partition = p_partition
                        and x.waitpoint_id = u.waitpoint_id and not x.is_dropped
                        and (not p_advanced or x.match_detail = 'advanced') offset 0) g
$$;

-- first_holding: the place of the signal with which a condition began to hold; null while it does not.
create or replace function flowfabric.first_holding(p_condition jsonb, p_signals flowfabric.recorded) returns integer
language plpgsql immutable as $$
declare
    v_low integer := 0;                                        -- does not hold
    v_high integer := cardinality(p_signals.ids);              -- holds
    v_middle integer;
begin
    if v_high = 0 or not flowfabric.holds_at(p_condition, p_signals, v_high) then
        return null;
    end if;
    -- A further signal never makes it false again.
    while v_high - v_low > 1 loop
        v_middle := (v_low + v_high) / 2;
        if flowfabric.holds_at(p_condition, p_signals, v_middle) then
            v_high := v_middle;
        else
            v_low := v_middle;
        end if;
    end loop;
    return v_high;
end;
$$;

create or replace function flowfabric.holds_at(p_condition jsonb, p_signals flowfabric.recorded, p_upto integer) returns boolean
language sql immutable as $$
    select f.holds from flowfabric.satisfiers(p_condition, p_signals.keys, p_signals.names, p_signals.ids, p_signals.types,
                                              p_signals.identities, p_upto) f
$$;

-- Ends of a suspension that are not the end of the execution

-- close_suspension: an open suspension and all its waitpoints; what came of a task's wait is remembered with it.
--
-- Takes    p_waitpoint: where the signal arrived that closes it, to be counted there; null when none did.
--          p_is_task: whether it is a task's wait; null when that is not known.
create or replace function flowfabric.close_suspension(
    p_partition integer, p_id uuid, p_number integer, p_waitpoints uuid[], p_reason text, p_trigger text,
    p_waitpoint uuid, p_closer uuid, p_satisfiers uuid[], p_is_task boolean, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_satisfied_at timestamptz := case when p_reason = 'resumed' then p_now end;
begin
    update flowfabric.suspension x
    set closed_at = p_now, close_reason = p_reason, trigger_type = p_trigger, closer_signal_id = p_closer,
        satisfier_signal_ids = p_satisfiers, satisfied_at = v_satisfied_at,
        last_signal_at = case when p_waitpoint is null then x.last_signal_at else p_now end
    where x.partition = p_partition and x.id = p_id and x.number = p_number;
    update flowfabric.waitpoint w
    set state = 'closed', closed_at = p_now, close_reason = p_reason, satisfied_at = v_satisfied_at,
        signal_count = case when w.waitpoint_id = p_waitpoint then w.signal_count + 1 else w.signal_count end,
        matched_signal_count = case when w.waitpoint_id = p_waitpoint then w.matched_signal_count + 1
                                    else w.matched_signal_count end,
        last_signal_at = case when w.waitpoint_id = p_waitpoint then p_now else w.last_signal_at end
    from unnest(p_waitpoints) as u (waitpoint_id)
    cross join lateral (select x.ctid as tid from flowfabric.waitpoint x
                        where x.partition = p_partition and x.waitpoint_id = u.waitpoint_id offset 0) f
    where w.ctid = f.tid;
    if coalesce(p_is_task, (select w.outlives_attempt from flowfabric.waitpoint w
                            where w.partition = p_partition and w.waitpoint_id = p_waitpoints[1])) then
        perform flowfabric.remember_wait(p_partition, p_id, p_waitpoints, p_reason, p_satisfiers);
    end if;
end;
$$;

-- resume: suspended -> resumable, or delayed first; its suspension is closed already.
create or replace function flowfabric.resume(p_partition integer, p_id uuid, p_delay_ms bigint, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_until timestamptz := case when p_delay_ms > 0 then p_now + flowfabric.ms(p_delay_ms) end;
    v_route integer; v_rank integer; v_created timestamptz; v_deadline timestamptz;
    v_flow uuid;
    v_floor boolean; v_wakes boolean;
begin
    update flowfabric.execution e
    set state = case when v_until is null then 'resumable' else 'delayed' end, resume_pending = true, delay_until = v_until,
        suspension_timeout_at = null,
        blocking_reason = case when v_until is null then 'waiting_for_worker' else 'waiting_for_resume_delay' end,
        blocking_detail = 'resumes at ' || to_char(v_until at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
        transitioned_at = p_now, mutated_at = p_now
    where e.partition = p_partition and e.id = p_id
    returning e.route, 9000 - e.priority, e.created_at, e.deadline_at, e.flow_id
    into v_route, v_rank, v_created, v_deadline, v_flow;
    if v_until is not null then
        perform flowfabric.set_timers('delay', array[p_partition], array[p_id], array[v_until]);
        if v_flow is not null then
            perform flowfabric.gate(array[p_partition], array[p_id]);
        end if;
        return;
    end if;
    -- A member of a flow may have to be held back.
    if v_flow is not null then
        perform flowfabric.make_ready(array[p_partition], array[p_id], null);
        return;
    end if;
    -- As make_ready does, for one.
    perform pg_advisory_xact_lock_shared(708301, v_route);
    insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at)
    values (v_route, v_rank, v_created, p_id, p_partition, v_deadline);
    select exists (select from flowfabric.ready_floor f where f.route = v_route),
           exists (select from flowfabric.sleeper x where x.topic = 'work' and x.until > clock_timestamp())
    into v_floor, v_wakes;
    if v_floor or current_setting('transaction_isolation') <> 'read committed' then
        perform flowfabric.lower_floor(array[v_route], array[v_rank], array[v_created], array[p_id]);
    end if;
    if v_wakes then
        perform pg_notify('flowfabric', 'work');
    end if;
end;
$$;

-- resume_execution: an operator ends a suspension, whatever its condition says
--
-- Locks    the execution.
-- Answers  one verdict: ok with the state, not_found or execution_not_suspended.
create or replace function flowfabric.resume_execution(p_partition integer, p_id uuid, p_trigger text, p_delay_ms bigint)
returns setof flowfabric.verdict
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz;
    v_slot smallint;
    e flowfabric.execution;
    s flowfabric.suspension;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    if e.id is null or e.state <> 'suspended' then
        return query select 1, case when e.id is null then 'not_found' else 'execution_not_suspended' end, null::text,
                            e.state, e.epoch, e.attempt_id, null::timestamptz;
        return;
    end if;
    select x.* into s from flowfabric.suspension x
    where x.partition = p_partition and x.id = p_id and x.closed_at is null;
    perform flowfabric.close_suspension(
        p_partition, p_id, s.number, s.waitpoint_ids, 'operator_resumed', p_trigger, null, null, null, null,
        v_now);
    perform flowfabric.resume(p_partition, p_id, p_delay_ms, v_now);
    v_slot := flowfabric.open_log(v_now);
    insert into flowfabric.event (slot, occurred_at, partition, id, flow_id, namespace, tags, operator_type, attempt_id,
                                  attempt_index, details)
    values (v_slot, v_now, e.partition, e.id, e.flow_id, e.namespace, e.tags, 'resumed', e.attempt_id, e.attempt_index,
            jsonb_build_object('trigger_type', p_trigger));
    return query select 1, 'ok', null::text, x.state, x.epoch, x.attempt_id, x.delay_until
    from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
end;
$$;

-- expire_suspensions: suspensions whose time is over; what follows is theirs to say.
--
-- Called by the duty, under the locks of executions that are suspended and due.
create or replace function flowfabric.expire_suspensions(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    s flowfabric.suspension;
    v_slot smallint := flowfabric.open_log(p_now);
    v_signal uuid;
    v_behavior text;
begin
    for s in
        select x.* from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select o.* from flowfabric.suspension o
                            where o.partition = u.partition and o.id = u.id offset 0) x
        where x.closed_at is null and x.timeout_at <= p_now
        order by x.timeout_at
    loop
        v_behavior := flowfabric.known_behavior(s.timeout_behavior);
        if v_behavior = 'escalate' then
            update flowfabric.suspension x
            set reason_code = 'waiting_for_operator_review', timeout_at = null, timeout_behavior = null
            where x.partition = s.partition and x.id = s.id and x.number = s.number;
            update flowfabric.waitpoint w set expires_at = null
            where w.partition = s.partition and w.id = s.id and w.suspension_id = s.suspension_id;
            update flowfabric.execution e
            set suspension_timeout_at = null, blocking_reason = 'paused_by_operator', mutated_at = p_now,
                transitioned_at = p_now,
                blocking_detail = 'missed its deadline of ' || to_char(s.timeout_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
                    || ' (' || s.reason_code || '), waiting for an operator'
            where e.partition = s.partition and e.id = s.id;
            insert into flowfabric.event (slot, occurred_at, partition, id, flow_id, namespace, tags, operator_type,
                                          attempt_id, attempt_index, details)
            select v_slot, p_now, e.partition, e.id, e.flow_id, e.namespace, e.tags, 'suspension_escalated', e.attempt_id,
                   e.attempt_index, jsonb_build_object('reason_code', s.reason_code)
            from flowfabric.execution e where e.partition = s.partition and e.id = s.id;
        elsif v_behavior = 'auto_resume_with_timeout_signal' then
            v_signal := gen_random_uuid();
            insert into flowfabric.signal
                (partition, id, ordinal, signal_id, waitpoint_id, waitpoint_key, suspension_id, signal_name,
                 signal_category, source_type, source_identity, correlation_id, payload_encoding, target_scope,
                 created_at, accepted_at, observed_effect, match_detail)
            select s.partition, s.id, coalesce(max(g.ordinal), 0) + 1, v_signal, s.waitpoint_ids[1], s.waitpoint_keys[1],
                   s.suspension_id, 'timeout', 'system', 'system', 'suspension_timeout', '', 'json', 'execution', p_now,
                   p_now, 'resume_condition_satisfied', 'not_evaluated'
            from flowfabric.signal g where g.partition = s.partition and g.id = s.id;
            perform flowfabric.close_suspension(
                s.partition, s.id, s.number, s.waitpoint_ids, 'timed_out_auto_resume', null, null, v_signal, array[v_signal],
                null, p_now);
            perform flowfabric.resume(s.partition, s.id, 0, p_now);
        else
            if v_behavior <> coalesce(s.timeout_behavior, 'fail') then
                raise warning 'suspension % has the unknown timeout behaviour %, taken as fail', s.suspension_id, s.timeout_behavior;
            end if;
            perform flowfabric.close_suspension(
                s.partition, s.id, s.number, s.waitpoint_ids, 'timed_out_' || v_behavior, null, null, null, null,
                null, p_now);
            perform flowfabric.end_executions(
                array[s.partition], array[s.id], null,
                case v_behavior when 'fail' then 'failed' when 'cancel' then 'cancelled' else 'expired' end,
                case v_behavior when 'cancel' then 'ended_cancelled' else 'ended_failure' end,
                case v_behavior when 'fail' then 'terminal_failed' when 'cancel' then 'cancelled' else 'expired' end,
                null, null, array['suspension_timeout:' || v_behavior], array['timeout'],
                case v_behavior when 'cancel' then 'suspension_timeout:cancel' end,
                case v_behavior when 'cancel' then 'system_timeout' end,
                'suspension_timeout', 'reconciler', false, p_now);
        end if;
    end loop;
end;
$$;

-- known_behavior: what is done when a suspension's time is over; an alias and unknown words are understood.
create or replace function flowfabric.known_behavior(p_behavior text) returns text
language sql immutable as $$
    select case when p_behavior in ('fail', 'cancel', 'expire', 'auto_resume_with_timeout_signal', 'escalate') then p_behavior
                when p_behavior = 'auto_resume' then 'auto_resume_with_timeout_signal' else 'fail' end
$$;

-- expire_suspension: the same for one execution.
--
-- Locks    the execution.
-- Answers  done with the behaviour that was applied, or why there was nothing to do: not_found, not_suspended,
--          no_active_suspension or not_yet_due.
create or replace function flowfabric.expire_suspension(p_partition integer, p_id uuid)
returns table (code text, behavior text)
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz;
    e flowfabric.execution;
    s flowfabric.suspension;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    select x.* into s from flowfabric.suspension x where x.partition = p_partition and x.id = p_id and x.closed_at is null;
    code := case when e.id is null then 'not_found' when e.state <> 'suspended' then 'not_suspended'
                 when s.id is null then 'no_active_suspension'
                 when s.timeout_at <= v_now then 'done' else 'not_yet_due' end;
    if code = 'done' then
        behavior := flowfabric.known_behavior(s.timeout_behavior);
        perform flowfabric.expire_suspensions(array[p_partition], array[p_id], v_now);
    end if;
    return next;
end;
$$;

-- observe_signals: what ended the newest suspension of an attempt, in the order of acceptance.
create or replace function flowfabric.observe_signals(p_partition integer, p_id uuid, p_attempt_index integer)
returns table (signal_id uuid, signal_name text, signal_category text, source_type text, source_identity text,
               correlation_id text, accepted_at timestamptz, payload bytea, payload_encoding text, waitpoint_key text)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select g.signal_id, g.signal_name, g.signal_category, g.source_type, g.source_identity, g.correlation_id, g.accepted_at,
           g.payload, g.payload_encoding, g.waitpoint_key
    from (select x.* from flowfabric.suspension x
          where x.partition = p_partition and x.id = p_id and x.attempt_index = p_attempt_index
          order by x.number desc limit 1) s
    join flowfabric.signal g on g.partition = s.partition and g.id = s.id and g.signal_id = any (s.satisfier_signal_ids)
    order by g.ordinal
$$;
