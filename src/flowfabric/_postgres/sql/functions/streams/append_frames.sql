-- append_frames: store frames of many streams in one call
--
-- Called by the workers that hold the leases. A refused frame changes nothing; those beside it are stored.
-- Takes    the fences of the holders; then per frame the number of its holder, counted from 1, the payload, and arrays that
--          are null if no frame has a value: mode (durable, summary, best_effort), kind, type, encoding, correlation id, the
--          caller's number, mark (frames with a mark up to the last one stored are known and left out), type mark, and of
--          best-effort frames the time to live, the floor and ceiling of the cap and the weight of the newest rate.
-- Locks    the executions, by partition and id: ids are minted under the lock, so they grow in the order of commits.
-- Returns  one row per frame: ok with its id, the count of appends and of deltas, and the cap on best-effort frames; known;
--          or the reason it was refused.
-- Roles    work, operate
create or replace function flowfabric.append_frames(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_holder integer[], p_payload bytea[], p_mode text[], p_kind text[], p_type text[], p_encoding text[],
    p_correlation text[], p_seq bigint[], p_mark integer[], p_type_mark integer[],
    p_ttl_ms bigint[], p_floor integer[], p_ceiling integer[], p_alpha double precision[])
returns table (ordinal integer, code text, detail text, ms bigint, n integer, frame_count integer, summary_version integer,
               maxlen_applied integer)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_ms bigint;
    v_ok integer[];
    v_tids tid[];
    v_heads flowfabric.stream_head[];    -- by the number of the holder
    v_refused integer[] := '{}';         -- the ordinals of frames that are refused, or stored already
    v_is_plain boolean;                  -- no two fences of one execution
    v_stored integer[]; v_new_ms bigint[]; v_new_n integer[]; v_frames integer[];
    v record;
    v_merged record;
begin
    perform flowfabric.require_read_committed();
    select l.at, l.ok, l.tids into v_now, v_ok, v_tids
    from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    v_ms := floor(extract(epoch from v_now) * 1000);

    -- A loop costs more than this query, which mostly finds nothing.
    if (select bool_or(octet_length(u.payload) > 65536 or octet_length(u.type) > 128
                       or u.mode not in ('durable', 'summary', 'best_effort')
                       or u.kind not in ('stdout', 'stderr', 'event', 'blob'))
        from unnest(p_payload, p_type, p_mode, p_kind) as u (payload, type, mode, kind)) then
        for v in
            select c.ord, c.code, c.detail
            from (select u.ord::integer as ord,
                         case when octet_length(u.payload) > 65536 then 'retention_limit_exceeded'
                              when octet_length(u.type) > 128 or u.mode not in ('durable', 'summary', 'best_effort')
                                   or u.kind not in ('stdout', 'stderr', 'event', 'blob') then 'invalid_input' end as code,
                         case when octet_length(u.payload) > 65536 then 'payload' when octet_length(u.type) > 128 then 'frame_type'
                              else 'mode or kind' end as detail
                  from unnest(p_payload, p_type, p_mode, p_kind) with ordinality as u (payload, type, mode, kind, ord)) c
            where c.code is not null
        loop
            return query select v.ord, v.code, v.detail, null::bigint, null::integer, null::integer, null::integer, null::integer;
            v_refused := v_refused || v.ord;
        end loop;
    end if;
    if cardinality(v_ok) < cardinality(p_id) then
        for v in
            select u.ord::integer as ord, r.code, r.detail
            from flowfabric.refuse_appends(p_partition, p_id, p_lease, p_epoch, p_attempt, v_ok) r
            join unnest(p_holder) with ordinality as u (holder, ord) on u.holder = r.holder
        loop
            continue when v.ord = any (v_refused);
            return query select v.ord, v.code, v.detail, null::bigint, null::integer, null::integer, null::integer, null::integer;
            v_refused := v_refused || v.ord;
        end loop;
    end if;
    if cardinality(v_ok) = 0 then
        return;
    end if;

    v_is_plain := cardinality(p_id) = 1 or cardinality(v_tids) = (select count(distinct t.tid) from unnest(v_tids) as t (tid));
    -- The common case has its own statement, with half the work: durable frames, one for each stream. It leaves those that
    -- are known, and those of streams that are about to be trimmed or have frames in the ring.
    if v_is_plain and p_mode is null and cardinality(p_holder) = cardinality(v_ok) and cardinality(v_ok) = cardinality(p_id)
       and cardinality(v_refused) = 0 and p_index is not null and array_position(p_index, null) is null then
        with picked as materialized (
            select u.ord::integer as ord, u.partition, u.id, u.attempt_index, greatest(v_ms, l.ms) as new_ms,
                   case when l.ms >= v_ms then l.n + 1 else 0 end as new_n, coalesce(l.frames, 0) + 1 as frames,
                   coalesce(l.durable, 0) + 1 as durable, coalesce(l.version, 0) as version,
                   coalesce(greatest(l.marks, u.mark), 0) as marks, l.trimmed, coalesce(l.cap, e.cap) as cap, l.folded, l.bound,
                   coalesce(u.kind, 'event') as kind, coalesce(u.type, '') as type, u.encoding, u.payload, u.correlation, u.seq,
                   u.type_mark
            from (select p_partition[y.o] as partition, p_id[y.o] as id, p_index[y.o] as attempt_index, y.*
                  from unnest(p_holder, p_payload, p_kind, p_type, p_encoding, p_correlation, p_seq, p_mark, p_type_mark)
                       with ordinality as y (o, payload, kind, type, encoding, correlation, seq, mark, type_mark, ord) offset 0) u
            -- The newest row up to three times: a scan reads all entries of a page that match, so first only the recent ones.
            left join lateral (
                (select f.ms, f.n, f.frames, f.durable, f.version, f.marks, f.trimmed, f.cap, f.has_live, f.folded, f.bound
                 from flowfabric.frame f
                 where f.partition = u.partition and f.id = u.id and f.attempt_index = u.attempt_index and f.ms >= v_ms - 30
                 order by f.ms desc, f.n desc limit 1)
                union all
                (select f.ms, f.n, f.frames, f.durable, f.version, f.marks, f.trimmed, f.cap, f.has_live, f.folded, f.bound
                 from flowfabric.frame f
                 where f.partition = u.partition and f.id = u.id and f.attempt_index = u.attempt_index and f.ms >= v_ms - 300
                 order by f.ms desc, f.n desc limit 1)
                union all
                (select f.ms, f.n, f.frames, f.durable, f.version, f.marks, f.trimmed, f.cap, f.has_live, f.folded, f.bound
                 from flowfabric.frame f
                 where f.partition = u.partition and f.id = u.id and f.attempt_index = u.attempt_index
                 order by f.ms desc, f.n desc limit 1)
                limit 1) l on true
            -- The first row of a stream takes the cap from the policy, the others from the row before.
            left join lateral (
                select nullif(flowfabric.stream_cap(x.policy), 10000) as cap from flowfabric.execution x
                where l.ms is null and x.partition = u.partition and x.id = u.id offset 0) e on true
            where coalesce(u.mark > l.marks, true) and l.has_live is not true
              and (coalesce(l.durable, 0) < 1 or flowfabric.has_room(l.durable, l.trimmed, coalesce(l.cap, 10000)))
        ), logged as (
            insert into flowfabric.frame
                (ms, partition, attempt_index, n, size, frames, durable, version, marks, type_marks, id, has_live, mode, kind,
                 frame_type, encoding, payloads, correlation_ids, seqs, trimmed, cap, folded, bound, ema, live_ms, live_cap)
            select p.new_ms, p.partition, p.attempt_index, p.new_n, 1, p.frames, p.durable, p.version, p.marks, p.type_mark, p.id,
                   false, 'durable', p.kind, p.type, p.encoding, array[p.payload],
                   case when p.correlation is not null then array[p.correlation] end,
                   case when p.seq is not null then array[p.seq] end, p.trimmed, p.cap, p.folded, p.bound, null, null, null
            from picked p
        )
        select array_agg(p.ord), array_agg(p.new_ms), array_agg(p.new_n), array_agg(p.frames)
        into v_stored, v_new_ms, v_new_n, v_frames from picked p;
        return query
        select o.ord, 'ok', null::text, o.ms, o.n, o.frames, null::integer, null::integer
        from unnest(v_stored, v_new_ms, v_new_n, v_frames) as o (ord, ms, n, frames);
        if cardinality(v_stored) = cardinality(p_holder) then
            perform flowfabric.wake_tails(p_partition, p_id);
            return;
        end if;
        v_refused := coalesce(v_stored, '{}');
    end if;

    -- Two fences of one execution are one holder.
    if not v_is_plain then
        select array_agg(coalesce(h.first, u.holder) order by u.ord) into p_holder
        from unnest(p_holder) with ordinality as u (holder, ord)
        left join (select t.o, min(t.o) over (partition by t.tid) as first from unnest(v_ok, v_tids) as t (o, tid)) h
               on h.o = u.holder;
    end if;
    select array_agg(h order by o) into v_heads
    from generate_subscripts(p_id, 1) o left join flowfabric.stream_heads(p_partition, p_id, v_ok, v_ms) h on h.holder = o;
    if p_mode is not null then
        for v in
            select u.holder, array_agg(u.ord::integer order by u.ord) as ords, array_agg(u.payload order by u.ord) as payloads
            from unnest(p_holder, p_mode, p_payload, p_mark) with ordinality as u (holder, mode, payload, mark, ord)
            join unnest(v_heads) h on h.holder = u.holder
            where u.mode = 'summary' and u.ord <> all (v_refused) and coalesce(u.mark > h.marks, true)
            group by u.holder
        loop
            select m.* into v_merged
            from flowfabric.merge_deltas(v_heads[v.holder], v.payloads, greatest(v_ms, (v_heads[v.holder]).ms)) m;
            return query
            select c.ord, c.code, c.detail, null::bigint, null::integer, null::integer, null::integer, null::integer
            from unnest(v.ords, v_merged.codes, v_merged.details) as c (ord, code, detail) where c.code is not null;
            v_refused := v_refused || array(select c.ord from unnest(v.ords, v_merged.codes) as c (ord, code) where c.code is not null);
            v_heads[v.holder].folded := (v_merged.head).folded;
            v_heads[v.holder].bound := (v_merged.head).bound;
        end loop;
        for v in
            select u.holder, max(u.ord)::integer as last, count(*)::integer as frames
            from unnest(p_holder, p_mode) with ordinality as u (holder, mode, ord)
            join unnest(v_heads) h on h.holder = u.holder
            where u.mode = 'best_effort' and u.ord <> all (v_refused)
            group by u.holder
        loop
            v_heads[v.holder] := flowfabric.live_rate(v_heads[v.holder], v.frames, v_ms, coalesce(p_ttl_ms[v.last], 0),
                                                      p_floor[v.last], p_ceiling[v.last], p_alpha[v.last]);
        end loop;
    end if;
    -- Durable frames beyond the cap are invisible; now and then they are removed.
    for v in
        select h.holder, h.partition, h.id, h.attempt_index, h.durable - h.cap as upto, coalesce(h.trimmed, 0) as trimmed, h.version
        from unnest(v_heads) h
        where not flowfabric.has_room(h.durable + cardinality(p_holder) - 1, h.trimmed, h.cap) and h.durable > h.cap
    loop
        perform flowfabric.trim_frames(v.partition, v.id, v.attempt_index, v.upto, v.upto - v.trimmed, v.version - 64);
        v_heads[v.holder].trimmed := v.upto;
    end loop;

    return query
    with given as (
        select u.ord::integer as ord, u.holder, u.payload, coalesce(u.mode, 'durable') as mode, coalesce(u.kind, 'event') as kind,
               coalesce(u.type, '') as type, u.encoding, u.correlation, u.seq, u.mark, u.type_mark, coalesce(u.ttl, 0) as ttl,
               coalesce(u.mark <= h.marks, false) as is_known
        from unnest(p_holder, p_payload, p_mode, p_kind, p_type, p_encoding, p_correlation, p_seq, p_mark, p_type_mark, p_ttl_ms)
             with ordinality as u (holder, payload, mode, kind, type, encoding, correlation, seq, mark, type_mark, ttl, ord)
        join unnest(v_heads) h on h.holder = u.holder
        where u.ord <> all (v_refused)
    ), begun as (
        select g.*, lag(k.key) over (partition by g.holder order by g.ord) is distinct from k.key as begins
        from given g
        cross join lateral (select concat_ws('|', g.mode, g.kind, g.ttl, length(coalesce(g.encoding, '')), g.encoding, g.type) as key) k
        where not g.is_known
    ), placed as (
        select b.*, row_number() over w as place, count(*) filter (where b.begins) over w as run,
               sum(octet_length(b.payload)) over w / 65536 as part,
               count(*) filter (where b.mode = 'durable') over w as durables,
               count(*) filter (where b.mode = 'summary') over w as deltas,
               count(*) filter (where b.mode = 'best_effort') over w as lives,
               max(b.mark) over w as last_mark
        from begun b
        window w as (partition by b.holder order by b.ord)
    ), runs as (
        select p.holder, max(p.place) as place, count(*) as size, max(p.durables) as durables, max(p.deltas) as deltas,
               max(p.lives) as lives, max(p.last_mark) as mark, max(p.type_mark) as type_mark, min(p.mode) as mode,
               min(p.kind) as kind, min(p.type) as type, min(p.encoding) as encoding, min(p.ttl) as ttl,
               array_agg(p.payload order by p.ord) as payloads,
               case when count(p.correlation) > 0 then array_agg(p.correlation order by p.ord) end as correlations,
               case when count(p.seq) > 0 then array_agg(p.seq order by p.ord) end as seqs
        from placed p group by p.holder, p.run, (p.place - 1) / 64, p.part
    ), stream as (
        select h.*, greatest(v_ms, h.ms) as new_ms, case when h.ms >= v_ms then h.n else -1 end as last_n,
               s.has_logged, h.has_live or s.has_lives as marked
        from (select r.holder, bool_or(r.mode <> 'best_effort') as has_logged, bool_or(r.mode = 'best_effort') as has_lives
              from runs r group by r.holder) s
        join unnest(v_heads) h on h.holder = s.holder
    ), written as materialized (
        select s.*, r.place, r.size, r.durables, r.deltas, r.lives, r.mark, r.type_mark, r.mode, r.kind, r.type, r.encoding, r.ttl,
               r.payloads, r.correlations, r.seqs
        from runs r join stream s on s.holder = r.holder
    ), logged as (
        insert into flowfabric.frame
            (ms, partition, attempt_index, n, size, frames, durable, version, marks, type_marks, id, has_live, mode, kind,
             frame_type, encoding, payloads, correlation_ids, seqs, trimmed, cap, folded, bound, ema, live_ms, live_cap)
        select w.new_ms, w.partition, w.attempt_index, w.last_n + w.place, w.size, w.frames + w.place, w.durable + w.durables,
               w.version + w.deltas, greatest(w.marks, w.mark), w.type_mark, w.id, w.marked, w.mode, w.kind, w.type, w.encoding,
               w.payloads, w.correlations, w.seqs, w.trimmed, nullif(w.cap, 10000), w.folded, w.bound, w.ema, w.live_ms, w.live_cap
        from written w where w.mode <> 'best_effort'
        union all
        -- The first best-effort frame leaves an empty row, which says that the stream has frames in the ring.
        select s.new_ms, s.partition, s.attempt_index, s.last_n + 1, 0, s.frames, s.durable, s.version, s.marks, null, s.id, true,
               'durable', 'event', '', null, '{}', null, null, s.trimmed, nullif(s.cap, 10000), s.folded, s.bound, s.ema, s.live_ms, s.live_cap
        from stream s where s.marked and not s.has_live and not s.has_logged
    ), ring as (
        insert into flowfabric.live_frame
            (ms, partition, attempt_index, n, size, frames, live, live_floor, live_cap, live_ms, ema, ttl_ms, slot, id, kind,
             frame_type, encoding, payloads, correlation_ids, seqs)
        select w.new_ms, w.partition, w.attempt_index, w.last_n + w.place, w.size, w.frames + w.place, w.live + w.lives,
               w.live_floor, w.live_cap, w.live_ms, w.ema, w.ttl, flowfabric.live_slot(w.new_ms), w.id, w.kind, w.type,
               w.encoding, w.payloads, w.correlations, w.seqs
        from written w where w.mode = 'best_effort'
    )
    select p.ord, 'ok', null::text, s.new_ms, (s.last_n + p.place)::integer, (s.frames + p.place)::integer,
           case p.mode when 'summary' then (s.version + p.deltas)::integer end,
           case p.mode when 'best_effort' then s.live_cap end
    from placed p join stream s on s.holder = p.holder
    union all
    select g.ord, 'known', null, null, null, null, null, null from given g where g.is_known;
    perform flowfabric.wake_tails(p_partition, p_id);
end;
$$;
