-- Durable steps: what a handler did, remembered by name and by how often the name was used before.

-- record_steps: remember what handlers did, for many executions at once
--
-- Called by the worker that holds the leases. What is recorded as done stays as it was: a repeated call changes nothing.
-- A failure is replaced by whatever comes after it.
-- Takes    per item the fence, the name and number, the kind and what belongs to it: step (result or error), now,
--          sleep (how long, in milliseconds), submit (the execution that was made).
-- Locks    the executions, by partition and id.
-- Answers  one verdict with ordinal 0 when all went well and no time is asked for; else one per item, with `at` for
--          now (the time) and sleep (when it ends).
create or replace function flowfabric.record_steps(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_name text[], p_n integer[], p_kind text[], p_result bytea[], p_encoding text[], p_error text[],
    p_seconds double precision[], p_ms bigint[], p_child_partition integer[], p_child_id uuid[])
returns setof flowfabric.verdict
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
declare
    v_now timestamptz;
    v_ok integer[];
    v_tids tid[];
begin
    select l.at, l.ok, l.tids into v_now, v_ok, v_tids
    from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, false) l;
    insert into flowfabric.step as s
        (partition, id, generation, name, n, kind, run, attempt_index, result, encoding, error, at, child_partition,
         child_id, seconds, recorded_at)
    select e.partition, e.id, e.generation, p_name[h.o], p_n[h.o], coalesce(p_kind[h.o], 'step'), e.retries + e.replays,
           e.attempt_index, p_result[h.o], p_encoding[h.o], p_error[h.o]::jsonb,
           case p_kind[h.o] when 'now' then v_now when 'sleep' then v_now + flowfabric.ms(p_ms[h.o]) end,
           p_child_partition[h.o], p_child_id[h.o], p_seconds[h.o], v_now
    from unnest(v_ok, v_tids) as h (o, tid)
    join flowfabric.execution e on e.ctid = h.tid
    on conflict (partition, id, generation, name, n) do update
    set kind = excluded.kind, run = excluded.run, attempt_index = excluded.attempt_index, result = excluded.result,
        encoding = excluded.encoding, error = excluded.error, at = excluded.at,
        child_partition = excluded.child_partition, child_id = excluded.child_id, seconds = excluded.seconds,
        recorded_at = excluded.recorded_at
    where s.error is not null;
    if p_kind is null and cardinality(v_ok) = cardinality(p_id) then
        return query select 0, 'ok', null::text, 'active', null::bigint, null::uuid, v_now;
        return;
    end if;
    return query
    select h.o, 'ok', null::text, 'active', null::bigint, null::uuid, s.at
    from unnest(v_ok, v_tids) as h (o, tid)
    join flowfabric.execution e on e.ctid = h.tid
    join flowfabric.step s on s.partition = e.partition and s.id = e.id and s.generation = e.generation
         and s.name = p_name[h.o] and s.n = p_n[h.o];
    if cardinality(v_ok) < cardinality(p_id) then
        return query select * from flowfabric.refuse_holders(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, false, null, v_ok, v_now);
    end if;
end;
$$;

-- read_steps: what is remembered of executions; of the current generation, or of all.
create or replace function flowfabric.read_steps(p_partition integer[], p_id uuid[], p_all boolean)
returns table (partition integer, id uuid, generation integer, name text, n integer, kind text, run integer,
               attempt_index integer, result bytea, encoding text, error jsonb, at timestamptz, child_partition integer,
               child_id uuid, seconds double precision, recorded_at timestamptz)
language sql stable security definer set search_path = flowfabric, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
    select s.partition, s.id, s.generation, s.name, s.n, s.kind, s.run, s.attempt_index, s.result, s.encoding, s.error,
           s.at, s.child_partition, s.child_id, s.seconds, s.recorded_at
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    join flowfabric.step s on s.partition = e.partition and s.id = e.id and (p_all or s.generation = e.generation)
    order by s.partition, s.id, s.generation, s.recorded_at, s.name, s.n
$$;

-- holds_lease: one row if the fence holds, none if not; the lease stays held until the transaction ends.
--
-- For statements that do more in the same transaction: their later parts run only behind this row.
create or replace function flowfabric.holds_lease(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer)
returns table (holds boolean)
language sql volatile security definer set search_path = flowfabric, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
    select true from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch],
                                             array[p_attempt], array[p_index], false) l
    where cardinality(l.ok) = 1
$$;
