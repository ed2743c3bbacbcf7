-- Durable steps: recorded by kind, name and how often the handler used the name before.

-- record_steps: record steps of handlers, for many executions in one call
--
-- Called by the worker that holds the leases. A step recorded as done never changes: a repeated call
-- changes nothing. A failed step is replaced by the next record.
-- Takes    per item the fence, the name and number, the kind and its values: step and result (result or error), now,
--          sleep (how long, in milliseconds; null: it has ended), submit (the created execution; outcome known if it
--          existed before), wait (the handler has read its signals); the place of an end. An array is null if no item
--          has a value; without kinds all are steps.
-- Locks    the executions, by partition and id.
-- Returns  one verdict with ordinal 0 if all succeeded and no time was requested; else one per item, with `at` for
--          now (the time) and sleep (when it ends).
-- Roles    work, operate
create or replace function flowfabric.record_steps(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_name text[], p_n integer[], p_kind text[], p_result bytea[], p_encoding text[], p_error text[],
    p_seconds double precision[], p_ms bigint[], p_child_partition integer[], p_child_id uuid[],
    p_outcome text[], p_place integer[])
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_ok integer[];
    v_tids tid[];
    v_made integer;
    v_all boolean;
begin
    perform flowfabric.require_read_committed();
    select l.at, l.ok, l.tids into v_now, v_ok, v_tids
    from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    v_all := cardinality(v_ok) = cardinality(p_id);
    if not v_all then
        return query select * from flowfabric.refuse_holders(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, null, v_ok, v_now);
        -- From here on the columns hold the items that passed, in order.
        select array_agg(p_name[o]), array_agg(p_n[o]), array_agg(p_kind[o]), array_agg(p_result[o]), array_agg(p_encoding[o]),
               array_agg(p_outcome[o]), array_agg(p_error[o]), array_agg(p_seconds[o]), array_agg(p_ms[o]),
               array_agg(p_place[o]), array_agg(p_child_partition[o]), array_agg(p_child_id[o])
        into p_name, p_n, p_kind, p_result, p_encoding, p_outcome, p_error, p_seconds, p_ms, p_place, p_child_partition,
             p_child_id
        from unnest(v_ok) o;
    end if;
    insert into flowfabric.step
        (partition, id, generation, name, n, kind, run, attempt_index, result, encoding, outcome, error, at, child_partition,
         child_id, seconds, place, recorded_at)
    select e.partition, e.id, e.generation, i.name, i.n, coalesce(i.kind, 'step'), e.retries + e.replays, e.attempt_index,
           i.result, i.encoding, i.outcome, i.error::jsonb,
           case i.kind when 'now' then v_now when 'sleep' then v_now + flowfabric.ms(i.ms) end,
           i.child_partition, i.child_id, i.seconds, i.place, v_now
    from unnest(v_tids, p_name, p_n, p_kind, p_result, p_encoding, p_outcome, p_error, p_seconds, p_ms, p_place,
                p_child_partition, p_child_id)
         as i (tid, name, n, kind, result, encoding, outcome, error, seconds, ms, place, child_partition, child_id)
    join flowfabric.execution e on e.ctid = i.tid
    where i.kind is null or (i.kind <> 'wait' and (i.kind <> 'sleep' or i.ms is not null))
    on conflict do nothing;
    get diagnostics v_made = row_count;
    if 'wait' = any (p_kind) or ('sleep' = any (p_kind) and p_place is not null) then
        update flowfabric.step s set is_unread = false, place = coalesce(s.place, i.place)
        from unnest(v_tids, p_kind, p_name, p_n, p_ms, p_place) as i (tid, kind, name, n, ms, place)
        join flowfabric.execution e on e.ctid = i.tid
        where (i.kind = 'wait' or i.kind = 'sleep' and i.ms is null)
          and s.partition = e.partition and s.id = e.id and s.generation = e.generation
          and s.kind = i.kind and s.name = i.name and s.n = i.n and (s.is_unread or s.place is null);
    end if;
    if v_made < cardinality(v_ok) then
        update flowfabric.step s
        set run = i.run, attempt_index = i.attempt_index, result = i.result, encoding = i.encoding,
            -- Things recorded after the failure belong to a branch that a later run need not take.
            outcome = case when s.outcome = 'retried' or exists (
                          select from flowfabric.step o
                          where o.partition = s.partition and o.id = s.id and o.generation = s.generation
                            and o.run = s.run and s.run < i.run and o.recorded_at > s.recorded_at)
                      then 'retried' else i.outcome end,
            error = i.error::jsonb, child_partition = i.child_partition, child_id = i.child_id, seconds = i.seconds,
            place = i.place, recorded_at = v_now, is_stray = false
        from (select distinct on (e.partition, e.id, coalesce(x.kind, 'step'), x.name, x.n)
                     e.partition, e.id, e.generation, coalesce(x.kind, 'step') as kind, x.name, x.n,
                     e.retries + e.replays as run, e.attempt_index, x.result, x.encoding, x.outcome, x.error, x.seconds, x.place,
                     x.child_partition, x.child_id
              from unnest(v_tids, p_name, p_n, p_kind, p_result, p_encoding, p_outcome, p_error, p_seconds,
                          p_place, p_child_partition, p_child_id) with ordinality
                   as x (tid, name, n, kind, result, encoding, outcome, error, seconds, place, child_partition, child_id, o)
              join flowfabric.execution e on e.ctid = x.tid
              order by e.partition, e.id, coalesce(x.kind, 'step'), x.name, x.n, x.error is not null, x.o) i
        where s.partition = i.partition and s.id = i.id and s.generation = i.generation and s.kind = i.kind
          and s.name = i.name and s.n = i.n and s.error is not null and s.kind <> 'wait';
    end if;
    if p_kind is null and v_all then
        return query select 0, 'ok', null::text, 'active', null::bigint, null::uuid, v_now;
        return;
    end if;
    return query
    select h.o, 'ok', null::text, 'active', null::bigint, null::uuid, s.at
    from unnest(v_ok, v_tids, p_kind, p_name, p_n) as h (o, tid, kind, name, n)
    join flowfabric.execution e on e.ctid = h.tid
    left join lateral (select x.at from flowfabric.step x
                       where x.partition = e.partition and x.id = e.id and x.generation = e.generation
                         and x.kind = coalesce(h.kind, 'step') and x.name = h.name and x.n = h.n offset 0) s on true;
end;
$$;
