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
language plpgsql security definer as $$
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
