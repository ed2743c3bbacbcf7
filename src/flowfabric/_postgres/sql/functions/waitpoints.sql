-- Waitpoints: pending until a suspension uses them, active while it is open, closed or expired for ever after.
--
-- Whoever changes one holds the lock of its execution. Those of an execution are looked for behind a fence (offset 0):
-- a plan made while the table was empty must not read all that are open when it is not.

-- create_waitpoint: a pending waitpoint and its token, for a lease holder to hand out before it suspends
--
-- Locks    the execution.
-- Answers  one verdict; with ok the token and when it expires.
create or replace function flowfabric.create_waitpoint(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_waitpoint uuid, p_key text, p_ms double precision, p_outlives_attempt boolean)
returns table (ordinal integer, code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz,
               token text)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_ok integer[];
    v_kid text;
    v_detail text;
    v_expires timestamptz;
begin
    select l.at, l.ok into v_now, v_ok
    from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt],
                                 array[p_index], false) l;
    if cardinality(v_ok) = 0 then
        return query select r.*, null::text from flowfabric.refuse_holders(
            array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt], array[p_index],
            false, null, v_ok, v_now) r;
        return;
    end if;
    v_kid := (select k.kid from flowfabric.keystore k where k.state = 'current');
    v_detail := case
        when p_key = '' then 'waitpoint_key_empty'
        when p_ms <= 0 then 'expires_in_not_positive'
        when (select count(*) from flowfabric.waitpoint w
              where w.partition = p_partition and w.id = p_id and w.state = 'pending' and w.expires_at > v_now) >= 1000
            then 'too_many_pending_waitpoints'
        when v_kid is null then 'hmac_secret_not_initialized' end;
    if v_detail is not null then
        return query select 1, 'invalid_input', v_detail, 'active', p_epoch, p_attempt, v_now, null::text;
        return;
    end if;
    v_expires := case when p_ms >= extract(epoch from flowfabric.far_date() - v_now) * 1000 then flowfabric.far_date()
                      else v_now + flowfabric.ms(p_ms) end;
    insert into flowfabric.waitpoint
        (partition, waitpoint_id, id, attempt_index, waitpoint_key, token_kid, state, outlives_attempt, created_at, expires_at)
    select p_partition, p_waitpoint, p_id, e.attempt_index, p_key, v_kid, 'pending', p_outlives_attempt, v_now, v_expires
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
    update flowfabric.execution e set has_waitpoints = true
    where e.partition = p_partition and e.id = p_id and not e.has_waitpoints;
    perform flowfabric.set_timers('waitpoint', array[p_partition], array[p_id], array[v_expires]);
    return query select 1, 'ok', null::text, 'active', null::bigint, null::uuid, v_expires,
                        flowfabric.sign_token(v_kid, p_partition, p_id, p_waitpoint);
end;
$$;

-- close_waitpoint: the holder does not want a pending waitpoint any more
--
-- Locks    the execution.
-- Answers  one verdict: ok (also when it is closed already), or why not.
create or replace function flowfabric.close_waitpoint(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_waitpoint uuid,
    p_reason text)
returns setof flowfabric.verdict
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz;
    v_ok integer[];
    v_code text;
    w flowfabric.waitpoint;
begin
    select l.at, l.ok into v_now, v_ok
    from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt],
                                 array[p_index], false) l;
    if cardinality(v_ok) = 0 then
        return query select r.* from flowfabric.refuse_holders(
            array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt], array[p_index],
            false, null, v_ok, v_now) r;
        return;
    end if;
    select x.* into w from flowfabric.waitpoint x where x.partition = p_partition and x.waitpoint_id = p_waitpoint;
    v_code := case when w.waitpoint_id is null then 'waitpoint_not_found'
                   when w.id <> p_id then 'invalid_waitpoint_for_execution'
                   when w.state = 'active' then 'waitpoint_not_pending' else 'ok' end;
    if v_code = 'ok' and w.state = 'pending' then
        update flowfabric.waitpoint x set state = 'closed', closed_at = v_now, close_reason = p_reason
        where x.partition = p_partition and x.waitpoint_id = p_waitpoint;
    end if;
    return query select 1, v_code, null::text, 'active', p_epoch, p_attempt, v_now;
end;
$$;

-- expire_waitpoints: pending waitpoints whose time is over; what they had received stays recorded. Whoever is parked
-- until a signal comes there goes on: none will.
create or replace function flowfabric.expire_waitpoints(p_partition integer[], p_id uuid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
begin
    with expired as (
        update flowfabric.waitpoint w set state = 'expired', closed_at = p_now, close_reason = 'never_committed'
        from unnest(p_partition, p_id) as u (partition, id)
        cross join lateral (select x.ctid as tid, x.state, x.expires_at from flowfabric.waitpoint x
                            where x.partition = u.partition and x.id = u.id offset 0) f
        where w.ctid = f.tid and f.state = 'pending' and f.expires_at <= p_now
        returning w.partition, w.id, w.waitpoint_id
    )
    select array_agg(d.partition), array_agg(d.id) into v_partitions, v_ids
    from (select distinct e.partition, e.id from expired x
          join flowfabric.execution e on e.partition = x.partition and e.id = x.id
          join flowfabric.waiter r on r.partition = x.partition and r.id = x.id
               and r.child_partition = x.partition and r.child_id = x.waitpoint_id
          where flowfabric.is_parked(e)) d;
    if v_ids is not null then
        perform flowfabric.promote(v_partitions, v_ids, p_now);
    end if;
end;
$$;

-- expire_waitpoint: the same for one execution, asked for by one of its waitpoints.
--
-- Locks    the execution.
-- Answers  expired, or why there was nothing to do: not_found, not_pending, not_yet_due.
create or replace function flowfabric.expire_waitpoint(p_partition integer, p_id uuid, p_waitpoint uuid) returns text
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_now timestamptz;
    w flowfabric.waitpoint;
begin
    perform 1 from flowfabric.execution e where e.partition = p_partition and e.id = p_id for no key update;
    v_now := flowfabric.now();
    select x.* into w from flowfabric.waitpoint x
    where x.partition = p_partition and x.waitpoint_id = p_waitpoint and x.id = p_id;
    if w.state = 'pending' and w.expires_at <= v_now then
        perform flowfabric.expire_waitpoints(array[p_partition], array[p_id], v_now);
        return 'expired';
    end if;
    return case when w.waitpoint_id is null then 'not_found' when w.state <> 'pending' then 'not_pending'
                else 'not_yet_due' end;
end;
$$;

-- end_waits: executions leave their attempt for good: open suspensions and their waitpoints close, and so do pending
-- waitpoints; with p_reason null (another attempt follows) those that outlive an attempt stay.
create or replace function flowfabric.end_waits(p_partition integer[], p_id uuid[], p_reason text[], p_now timestamptz)
returns void
language plpgsql as $$
begin
    update flowfabric.suspension s set closed_at = p_now, close_reason = u.reason
    from unnest(p_partition, p_id, p_reason) as u (partition, id, reason)
    cross join lateral (select x.ctid as tid, x.closed_at from flowfabric.suspension x
                        where x.partition = u.partition and x.id = u.id offset 0) f
    where s.ctid = f.tid and f.closed_at is null;
    update flowfabric.waitpoint w
    set state = 'closed', closed_at = p_now,
        close_reason = case when w.state = 'active' then u.reason else 'attempt_ended' end
    from unnest(p_partition, p_id, p_reason) as u (partition, id, reason)
    cross join lateral (select x.ctid as tid, x.state, x.outlives_attempt from flowfabric.waitpoint x
                        where x.partition = u.partition and x.id = u.id offset 0) f
    where w.ctid = f.tid and f.state in ('pending', 'active') and (u.reason is not null or not f.outlives_attempt);
end;
$$;

-- move_waitpoints: another attempt begins; waitpoints that outlive an attempt go over to it, others have closed.
create or replace function flowfabric.move_waitpoints(p_tids tid[], p_now timestamptz) returns void
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[];
begin
    select array_agg(e.partition), array_agg(e.id) into v_partitions, v_ids
    from unnest(p_tids) as u (tid) join flowfabric.execution e on e.ctid = u.tid
    where e.has_waitpoints and (e.pending <> 'interrupted' or e.lease_lost is not null);
    if v_ids is not null then
        perform flowfabric.end_waits(v_partitions, v_ids, array_fill(null::text, array[cardinality(v_ids)]), p_now);
        update flowfabric.waitpoint w set attempt_index = e.attempts
        from unnest(v_partitions, v_ids) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        cross join lateral (select x.ctid as tid, x.state from flowfabric.waitpoint x
                            where x.partition = u.partition and x.id = u.id offset 0) f
        where w.ctid = f.tid and f.state = 'pending';
    end if;
end;
$$;

-- Reads

-- list_pending_waitpoints: the pending and active waitpoints of an execution, by id, without their tokens
--
-- Answers  one row more than the page if there is more; a row without a waitpoint when there is no such execution.
create or replace function flowfabric.list_pending_waitpoints(p_partition integer, p_id uuid, p_after uuid, p_limit integer)
returns table (waitpoint_id uuid, waitpoint_key text, state text, required_signal_names text[], created_at timestamptz,
               activated_at timestamptz, expires_at timestamptz, token_kid text, token_fingerprint text)
language plpgsql stable security definer set search_path = flowfabric, pg_temp as $$
#variable_conflict use_column
begin
    if not exists (select from flowfabric.execution e where e.partition = p_partition and e.id = p_id) then
        return next;
        return;
    end if;
    return query
    select w.waitpoint_id, w.waitpoint_key, w.state, w.required_signal_names, w.created_at, w.activated_at,
           nullif(w.expires_at, flowfabric.far_date()), w.token_kid,
           left(flowfabric.token_digest(w.token_kid, w.partition, w.id, w.waitpoint_id), 16)
    from flowfabric.waitpoint w
    where w.partition = p_partition and w.id = p_id and (p_after is null or w.waitpoint_id > p_after)
      and (w.state = 'active' or (w.state = 'pending' and w.expires_at > flowfabric.now()))
    order by w.waitpoint_id limit p_limit + 1;
end;
$$;

-- read_waitpoint_token: the token of a waitpoint that can still be signalled, or null.
create or replace function flowfabric.read_waitpoint_token(p_partition integer, p_waitpoint uuid) returns text
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select flowfabric.sign_token(w.token_kid, w.partition, w.id, w.waitpoint_id) from flowfabric.waitpoint w
    where w.partition = p_partition and w.waitpoint_id = p_waitpoint
      and (w.state = 'active' or (w.state = 'pending' and w.expires_at > flowfabric.now()))
$$;

-- list_suspended: executions with an open suspension, oldest first.
create or replace function flowfabric.list_suspended(
    p_partition integer, p_after_at timestamptz, p_after_id uuid, p_limit integer)
returns table (id uuid, suspended_at timestamptz, reason_code text, timeout_at timestamptz)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select s.id, s.suspended_at, s.reason_code, s.timeout_at from flowfabric.suspension s
    where s.partition = p_partition and s.closed_at is null
      and (p_after_at is null or (s.suspended_at, s.id) > (p_after_at, p_after_id))
    order by s.suspended_at, s.id limit p_limit + 1
$$;

-- read_suspension: the newest suspension of an execution, open or closed.
create or replace function flowfabric.read_suspension(p_partition integer, p_id uuid) returns setof flowfabric.suspension
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select s.* from flowfabric.suspension s where s.partition = p_partition and s.id = p_id
    order by s.number desc limit 1
$$;

-- list_waits: the waitpoints of all executions that somebody waits at, the longest waiting first.
create or replace function flowfabric.list_waits(
    p_after_at timestamptz, p_after_id uuid, p_limit integer, p_lane text, p_namespace text, p_key text)
returns table (partition integer, id uuid, kind text, lane text, namespace text, waitpoint_id uuid, waitpoint_key text,
               state text, reason_code text, created_at timestamptz, timeout_at timestamptz, timeout_behavior text,
               required_signal_names text[], signal_count integer)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select w.partition, w.id, r.kind, r.lane, e.namespace, w.waitpoint_id, w.waitpoint_key, w.state, s.reason_code,
           w.created_at, case when w.state = 'active' then s.timeout_at else nullif(w.expires_at, flowfabric.far_date()) end,
           s.timeout_behavior, w.required_signal_names, w.signal_count
    from flowfabric.waitpoint w
    join flowfabric.execution e on e.partition = w.partition and e.id = w.id
    join flowfabric.route r on r.id = e.route
    left join flowfabric.suspension s on s.partition = w.partition and s.id = w.id and s.closed_at is null and w.state = 'active'
    where w.state in ('pending', 'active') and (w.state = 'active' or w.expires_at > flowfabric.now())
      and (p_after_at is null or (w.created_at, w.waitpoint_id) > (p_after_at, p_after_id))
      and (p_lane is null or r.lane = p_lane) and (p_namespace is null or e.namespace = p_namespace)
      and (p_key is null or w.waitpoint_key = p_key)
    order by w.created_at, w.waitpoint_id limit p_limit + 1
$$;
