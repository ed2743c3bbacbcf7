-- Waits of tasks: a step of kind `wait` remembers the waitpoints of a wait, its deadline, and what came of it.

-- open_wait: the waitpoints of a wait and the memory of them, in one
--
-- Called by the lease holder. What is remembered already is answered as it is.
-- Locks    the execution.
-- Answers  one verdict; with ok the waitpoints, their keys and tokens, and `at`, the deadline.
create or replace function flowfabric.open_wait(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_name text,
    p_n integer, p_waitpoints uuid[], p_keys text[], p_ms double precision)
returns table (ordinal integer, code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz,
               waitpoint_ids uuid[], waitpoint_keys text[], tokens text[])
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_ok integer[];
    v_kid text;
    v_detail text;
    v_made integer;
begin
    select l.at, l.ok into v_now, v_ok
    from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt],
                                 array[p_index], false) l;
    if cardinality(v_ok) = 0 then
        return query select r.*, null::uuid[], null::text[], null::text[] from flowfabric.refuse_holders(
            array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt], array[p_index],
            false, null, v_ok, v_now) r;
        return;
    end if;
    v_kid := (select k.kid from flowfabric.keystore k where k.state = 'current');
    v_detail := case when v_kid is null then 'hmac_secret_not_initialized'
                     when cardinality(p_waitpoints) + (
                         select count(*) from (select x.state from flowfabric.waitpoint x
                                               where x.partition = p_partition and x.id = p_id offset 0) w
                         where w.state = 'pending') > 1000
                          and not exists (select from flowfabric.execution e join flowfabric.step x
                                          on x.partition = e.partition and x.id = e.id and x.generation = e.generation
                                          and x.kind = 'wait' and x.name = p_name and x.n = p_n and x.error is null
                                          where e.partition = p_partition and e.id = p_id)
                         then 'too_many_pending_waitpoints' end;
    if v_detail is not null then
        return query select 1, 'invalid_input', v_detail, 'active', p_epoch, p_attempt, v_now,
                            null::uuid[], null::text[], null::text[];
        return;
    end if;
    insert into flowfabric.step (partition, id, generation, name, n, kind, run, attempt_index, at, waitpoint_ids, recorded_at)
    select e.partition, e.id, e.generation, p_name, p_n, 'wait', e.retries + e.replays, e.attempt_index,
           case when p_ms is not null then least(v_now + flowfabric.ms(least(p_ms, 1e14)), flowfabric.far_date()) end,
           p_waitpoints, v_now
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id
    on conflict (partition, id, generation, kind, name, n) do update
    set run = excluded.run, attempt_index = excluded.attempt_index, at = excluded.at, waitpoint_ids = excluded.waitpoint_ids,
        recorded_at = excluded.recorded_at, result = null, encoding = null, error = null
    where step.error is not null;   -- forgotten by a replay
    get diagnostics v_made = row_count;
    if v_made > 0 then
        insert into flowfabric.waitpoint
            (partition, waitpoint_id, id, attempt_index, waitpoint_key, token_kid, state, outlives_attempt, created_at, expires_at)
        select p_partition, u.waitpoint_id, p_id, e.attempt_index, u.key, v_kid, 'pending', true, v_now, flowfabric.far_date()
        from unnest(p_waitpoints, p_keys) as u (waitpoint_id, key)
        join flowfabric.execution e on e.partition = p_partition and e.id = p_id;
        update flowfabric.execution e set has_waitpoints = true
        where e.partition = p_partition and e.id = p_id and not e.has_waitpoints;
    end if;
    return query
    select 1, 'ok', null::text, 'active', null::bigint, null::uuid, s.at, s.waitpoint_ids,
           array_agg(w.waitpoint_key order by u.place),
           array_agg(coalesce(flowfabric.sign_token(w.token_kid, w.partition, w.id, w.waitpoint_id), '') order by u.place)
    from flowfabric.execution e
    join flowfabric.step s on s.partition = e.partition and s.id = e.id and s.generation = e.generation and s.kind = 'wait'
         and s.name = p_name and s.n = p_n
    cross join lateral unnest(s.waitpoint_ids) with ordinality as u (waitpoint_id, place)
    join flowfabric.waitpoint w on w.partition = e.partition and w.waitpoint_id = u.waitpoint_id
    where e.partition = p_partition and e.id = p_id
    group by s.at, s.waitpoint_ids;
end;
$$;

-- settle_wait: how a wait stands, and the memory of it once it is over
--
-- Called by the lease holder, before it goes on waiting; or, with p_give_up, when it does not: an open wait is over then.
-- Locks    the execution.
-- Answers  one verdict; with ok the outcome: open, resumed, timed_out, operator_resumed or given_up, what is remembered of it, and
--          how many signals each waitpoint has received.
create or replace function flowfabric.settle_wait(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_name text,
    p_n integer, p_suspension uuid, p_condition text, p_reason text, p_deadline timestamptz, p_give_up boolean)
returns table (ordinal integer, code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz,
               outcome text, result bytea, seen integer[])
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_ok integer[];
    t flowfabric.step;
    v_detail text;
begin
    perform flowfabric.require_read_committed();
    select l.at, l.ok into v_now, v_ok
    from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt],
                                 array[p_index], false) l;
    if cardinality(v_ok) = 0 then
        return query select r.*, null::text, null::bytea, null::integer[] from flowfabric.refuse_holders(
            array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt], array[p_index],
            false, null, v_ok, v_now) r;
        return;
    end if;
    select x.* into t from flowfabric.execution e
    join flowfabric.step x on x.partition = e.partition and x.id = e.id and x.generation = e.generation and x.kind = 'wait'
         and x.name = p_name and x.n = p_n
    where e.partition = p_partition and e.id = p_id;
    if t.id is null then
        return query select 1, 'waitpoint_not_found', null::text, 'active', p_epoch, p_attempt, v_now, null::text,
                            null::bytea, null::integer[];
        return;
    end if;
    if t.encoding is null and exists (
            select from flowfabric.waitpoint w where w.partition = p_partition and w.waitpoint_id = t.waitpoint_ids[1]
            and w.state = 'pending') then
        select x.detail into v_detail from flowfabric.suspend(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, false, p_suspension, t.waitpoint_ids,
            array_fill(null::text, array[cardinality(t.waitpoint_ids)]), p_condition, '{}', p_reason, 'worker', null,
            null, null, null, true) x where x.code = 'invalid_input';
        if v_detail is not null then   -- the condition is about other keys: the code was changed
            return query select 1, 'invalid_input', v_detail, 'active', p_epoch, p_attempt, v_now, null::text,
                                null::bytea, null::integer[];
            return;
        end if;
        select x.* into t from flowfabric.step x
        where x.partition = t.partition and x.id = t.id and x.generation = t.generation and x.kind = 'wait'
          and x.name = t.name and x.n = t.n;
        if t.encoding is null and (p_give_up or p_deadline <= v_now) then
            v_detail := case when p_give_up then 'given_up' else 'timed_out_auto_resume' end;
            update flowfabric.waitpoint w set state = 'closed', closed_at = v_now, close_reason = v_detail
            where w.partition = p_partition and w.waitpoint_id = any (t.waitpoint_ids) and w.state = 'pending';
            perform flowfabric.remember_wait(p_partition, p_id, t.waitpoint_ids, v_detail, null);
            t.encoding := case when p_give_up then 'given_up' else 'timed_out' end;
        end if;
    end if;
    if p_give_up and t.encoding <> 'given_up' then
        -- Signals had come, but the handler turned to something else before it was told.
        update flowfabric.step x set encoding = 'given_up', result = null
        where x.partition = t.partition and x.id = t.id and x.generation = t.generation and x.kind = 'wait'
          and x.name = t.name and x.n = t.n;
        t.encoding := 'given_up';
    end if;
    return query
    select 1, 'ok', null::text, 'active', null::bigint, null::uuid, t.at, coalesce(t.encoding, 'open'), t.result,
           array_agg(w.signal_count order by u.place)
    from unnest(t.waitpoint_ids) with ordinality as u (waitpoint_id, place)
    join flowfabric.waitpoint w on w.partition = p_partition and w.waitpoint_id = u.waitpoint_id;
end;
$$;

-- remember_wait: what came of a task's wait, kept where its handler looks first.
--
-- Takes    the waitpoints of the wait and why they closed. A wait that ends with its execution has nobody to tell.
create or replace function flowfabric.remember_wait(
    p_partition integer, p_id uuid, p_waitpoints uuid[], p_reason text, p_satisfiers uuid[]) returns void
language plpgsql as $$
declare
    v_outcome text := case p_reason when 'resumed' then 'resumed' when 'timed_out_auto_resume' then 'timed_out'
                                    when 'operator_resumed' then 'operator_resumed' when 'given_up' then 'given_up' end;
    v_result bytea;
begin
    if v_outcome = 'resumed' then
        select convert_to(jsonb_agg(jsonb_build_object(
                   'signal_id', g.signal_id, 'name', g.signal_name, 'key', g.waitpoint_key, 'category', g.signal_category,
                   'source_type', g.source_type, 'source_identity', g.source_identity, 'correlation_id', g.correlation_id,
                   'accepted_at', to_char(g.accepted_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
                   'payload', translate(encode(g.payload, 'base64'), E'\n', ''), 'payload_encoding', g.payload_encoding)
                   order by g.ordinal)::text, 'UTF8')
        into v_result
        from unnest(p_satisfiers) as u (signal_id)
        join flowfabric.signal g on g.partition = p_partition and g.id = p_id and g.signal_id = u.signal_id;
    end if;
    update flowfabric.step s set result = v_result, encoding = v_outcome, recorded_at = flowfabric.now()
    from flowfabric.execution e
    where v_outcome is not null and e.partition = p_partition and e.id = p_id and s.partition = e.partition and s.id = e.id
      and s.generation = e.generation and s.kind = 'wait' and s.waitpoint_ids = p_waitpoints and s.encoding is null;
end;
$$;

-- forget_signals: executions that ended are replayed: what they still waited for they wait for anew, and so for a signal
-- whose absence was their end. Their waitpoints are closed.
--
-- Called by replay, under its locks. A wait is forgotten as a failed step is, a time limit of its own altogether.
create or replace function flowfabric.forget_signals(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    with forgotten as (
        update flowfabric.step s set error = '{"type": "NoSignal", "message": "replayed"}'
        from unnest(p_partition, p_id) as u (partition, id)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        where e.has_waitpoints and e.state <> 'completed' and s.partition = e.partition and s.id = e.id
          and s.generation = e.generation and s.kind = 'wait'
          and (s.encoding is null
               -- Of those that ended without a signal the last one is what the handler failed of.
               or s.encoding in ('timed_out', 'operator_resumed') and e.failure_category in ('wait_timed_out', 'wait_overridden')
                  and s.recorded_at = (select max(x.recorded_at) from flowfabric.step x
                                       where x.partition = e.partition and x.id = e.id and x.generation = e.generation
                                         and x.kind = 'wait' and x.encoding in ('timed_out', 'operator_resumed')))
        returning s.partition, s.id, s.generation, s.name, s.n
    )
    delete from flowfabric.step s using forgotten f
    where s.partition = f.partition and s.id = f.id and s.generation = f.generation and s.kind = 'sleep'
      and s.name = 'timeout of wait ' || f.name || ' ' || f.n;
end;
$$;
