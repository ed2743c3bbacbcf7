-- Waits of tasks: a step of kind `wait` records the waitpoints of a wait, its deadline, and its outcome.

-- open_wait: create and record the waitpoints of a wait in one call
--
-- Called by the lease holder. An existing record is returned unchanged. A wait that a replay reset opens its waitpoints again.
-- Takes    p_schema: the JSON schema of payloads, or null.
-- Locks    the execution.
-- Returns  one verdict; with ok the waitpoints, their keys and tokens, and `at`, the deadline.
-- Roles    work, operate
create or replace function flowfabric.open_wait(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_name text,
    p_n integer, p_waitpoints uuid[], p_keys text[], p_ms double precision, p_schema text)
returns table (ordinal integer, code text, detail text, state text, lease_epoch bigint, attempt_id uuid, at timestamptz,
               waitpoint_ids uuid[], waitpoint_keys text[], tokens text[])
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_held flowfabric.verdict;
    v_kid text;
    v_detail text;
    v_made integer;
    v_known uuid[];   -- the waitpoints of a wait that was reset by a replay, if it has the same keys
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return query select v_held.*, null::uuid[], null::text[], null::text[];
        return;
    end if;
    v_now := v_held.at;
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
    select array_agg(w.waitpoint_id order by u.place) into v_known
    from flowfabric.execution e
    join flowfabric.step s on s.partition = e.partition and s.id = e.id and s.generation = e.generation and s.kind = 'wait'
         and s.name = p_name and s.n = p_n and s.error is not null
    cross join lateral unnest(s.waitpoint_ids) with ordinality as u (waitpoint_id, place)
    cross join lateral (select x.waitpoint_id, x.waitpoint_key from flowfabric.waitpoint x
                        where x.partition = e.partition and x.waitpoint_id = u.waitpoint_id offset 0) w
    where e.partition = p_partition and e.id = p_id and e.replays > 0
    having array_agg(w.waitpoint_key order by u.place) = p_keys;
    insert into flowfabric.step (partition, id, generation, name, n, kind, run, attempt_index, at, waitpoint_ids, recorded_at)
    select e.partition, e.id, e.generation, p_name, p_n, 'wait', e.retries + e.replays, e.attempt_index,
           case when p_ms is not null then least(v_now + flowfabric.ms(least(p_ms, 1e14)), flowfabric.far_date()) end,
           coalesce(v_known, p_waitpoints), v_now
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id
    on conflict (partition, id, generation, kind, name, n) do update
    set run = excluded.run, attempt_index = excluded.attempt_index, at = excluded.at, waitpoint_ids = excluded.waitpoint_ids,
        recorded_at = excluded.recorded_at, result = null, outcome = null, error = null, place = null
    where step.error is not null;   -- reset by a replay
    get diagnostics v_made = row_count;
    if v_known is not null then
        perform flowfabric.reopen_waitpoints(p_partition, p_id, v_known, p_schema, true, v_now);
    elsif v_made > 0 then
        insert into flowfabric.waitpoint
            (partition, waitpoint_id, id, attempt_index, waitpoint_key, token_kid, state, outlives_attempt, payload_schema, created_at,
             expires_at)
        select p_partition, u.waitpoint_id, p_id, e.attempt_index, u.key, v_kid, 'pending', true, p_schema, v_now, flowfabric.far_date()
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
