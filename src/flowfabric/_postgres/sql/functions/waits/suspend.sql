-- suspend: active -> suspended, until signals satisfy a condition, an operator resumes it, or its timeout expires
--
-- Called by the lease holder. A binding is a fresh waitpoint (id and key given) or a pending one (no key).
-- Takes    p_timeout_at, or p_timeout_ms from now on: when it times out.
-- Locks    the execution; waitpoints, suspensions and signals change under that lock only.
-- Returns  one row: ok with variant suspended or already_satisfied (the lease is kept), or the reason it was
--          refused. A repeated call with the same key and fence gets the result of the first.
-- Roles    work, operate
create or replace function flowfabric.suspend(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_by_triple boolean,
    p_suspension uuid, p_waitpoints uuid[], p_keys text[], p_condition text, p_policy text, p_reason text,
    p_requested_by text, p_timeout_at timestamptz, p_timeout_ms bigint, p_behavior text, p_pointer text, p_idempotency_key text)
returns setof flowfabric.suspended
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_held flowfabric.verdict;
    e flowfabric.execution;
    s flowfabric.suspension;
    v_condition jsonb := p_condition::jsonb;
    b record;   -- the bindings, checked
    v record;   -- what the signals so far come to
    v_timeout timestamptz := p_timeout_at;
    v_behavior text := p_behavior;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.check_time(p_timeout_at);
    if p_reason not in ('waiting_for_signal', 'step_boundary', 'waiting_for_approval', 'waiting_for_callback',
                        'waiting_for_tool_result', 'waiting_for_operator_review', 'manual_pause', 'paused_by_policy',
                        'paused_by_budget') then
        raise exception 'the reason is not known' using errcode = 'invalid_parameter_value';
    end if;
    if coalesce(p_timeout_at, v_now + flowfabric.ms(p_timeout_ms)) + interval '10 minutes' < v_now then
        return query select * from flowfabric.not_suspended('invalid_input', 'timeout_at_in_past', e);
        return;
    end if;
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    v_now := coalesce(v_held.at, flowfabric.now());
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
    elsif v_held.code is not null then
        return query select v_held.code, v_held.detail, v_held.state, v_held.lease_epoch, v_held.attempt_id, null::text,
                            null::uuid, null::uuid[], null::text[], null::text[], null::integer, null::text, null::text,
                            null::bigint;
        return;
    end if;

    select c.* into b from flowfabric.check_bindings(e, p_waitpoints, p_keys, v_condition, v_now) c;
    if b.code is not null then
        return query select * from flowfabric.not_suspended(b.code, b.detail, e);
        return;
    end if;
    select c.* into v from flowfabric.evaluate(p_partition, b.pending, v_condition) c;
    v_timeout := coalesce(v_timeout, v_now + flowfabric.ms(p_timeout_ms));
    if v_timeout is null and (v.weighed).closer is null and (e.policy -> 'suspension_policy' ->> 'default_timeout_ms') is not null then
        v_timeout := v_now + flowfabric.ms((e.policy -> 'suspension_policy' ->> 'default_timeout_ms')::bigint);
        v_behavior := coalesce(e.policy -> 'suspension_policy' ->> 'timeout_behavior', 'fail');
    end if;
    s := flowfabric.write_suspension(
        e, p_suspension, p_waitpoints, b.keys, b.kid, b.pending, v_condition, p_policy::jsonb, p_reason, p_requested_by,
        v_timeout, v_behavior, p_pointer, p_idempotency_key, v.signals, v.weighed, v_now);
    if s.id is null then
        -- Another execution was faster to take an id that the caller made.
        return query select * from flowfabric.not_suspended('waitpoint_already_exists', null, e);
        return;
    end if;
    if not s.is_early then
        perform flowfabric.give_up_lease(s, v_now);
        select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    end if;
    return query select * from flowfabric.as_suspended(s, e);
end;
$$;

-- as_suspended: the row of a suspension, with tokens signed again.
create or replace function flowfabric.as_suspended(s flowfabric.suspension, e flowfabric.execution)
returns setof flowfabric.suspended
language sql stable as $$
    select 'ok', null::text, e.state, s.lease_epoch, s.attempt_id,
           case when s.is_early then 'already_satisfied' else 'suspended' end, s.suspension_id, s.waitpoint_ids, s.waitpoint_keys,
           (select array_agg(coalesce(flowfabric.sign_token(w.token_kid, w.partition, w.id, w.waitpoint_id), '') order by u.place)
            from unnest(s.waitpoint_ids) with ordinality as u (waitpoint_id, place)
            cross join lateral (select x.* from flowfabric.waitpoint x
                                where x.partition = s.partition and x.waitpoint_id = u.waitpoint_id offset 0) w),
           s.attempt_index, r.lane, k.worker_instance_id, (extract(epoch from flowfabric.lease_ttl(e)) * 1000)::bigint
    from flowfabric.route r left join flowfabric.worker k on k.id = e.worker where r.id = e.route
$$;

-- not_suspended: the row of a refusal.
create or replace function flowfabric.not_suspended(p_code text, p_detail text, e flowfabric.execution)
returns setof flowfabric.suspended
language sql immutable as $$
    select p_code, p_detail, e.state, e.epoch, e.attempt_id, null::text, null::uuid, null::uuid[], null::text[], null::text[],
           null::integer, null::text, null::text, null::bigint
$$;
