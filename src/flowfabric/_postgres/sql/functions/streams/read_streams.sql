-- read_streams: frames of many streams and the state of each, from one snapshot
--
-- Takes    per stream the attempt (null: the latest) and the first and the last id, both included; p_limit: frames of each
--          stream at most; p_live: with best-effort frames.
-- Returns  per stream a row without an id, which says whether its execution exists, how many attempts that has and whether
--          it ended, which attempt the stream is of, its count of appends and the last cap on best-effort frames, how many
--          durable frames are no longer kept, and when and why it was closed; then its visible frames in order, each with
--          the number of durable frames up to it (null: best effort).
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_streams(
    p_partition integer[], p_id uuid[], p_attempt integer[], p_from_ms bigint[], p_from_n bigint[], p_to_ms bigint[],
    p_to_n bigint[], p_limit integer, p_live boolean)
returns table (ordinal integer, ms bigint, n integer, mode text, kind text, frame_type text, encoding text, payload bytea,
               correlation_id text, seq bigint, summary_version integer, ttl_ms bigint, is_known boolean, attempts integer,
               ended boolean, attempt_index integer, frame_count integer, maxlen_applied integer, closed_at timestamptz,
               closed_reason text, number integer)
language plpgsql stable security definer as $$
#variable_conflict use_column
begin
    return query
    with head as (
        select u.ord::integer as ord, u.partition, u.id, coalesce(u.attempt, e.attempt_index, 0) as attempt, u.from_ms, u.from_n,
               u.to_ms, u.to_n, e.id is not null as is_known, e.attempts, e.completed_at is not null as ended, c.at as closed_at,
               c.reason as closed_reason, greatest(l.frames, r.frames) as frames, coalesce(l.durable, 0) as durable,
               coalesce(l.version, 0) as version, coalesce(l.has_live, false) as has_live, coalesce(r.live_floor, 0) as live_floor,
               case when (l.ms, l.n) > (r.ms, r.n) then l.live_cap else coalesce(r.live_cap, l.live_cap) end as live_cap,
               flowfabric.stream_cap(e.policy) as cap
        from unnest(p_partition, p_id, p_attempt, p_from_ms, p_from_n, p_to_ms, p_to_n) with ordinality
             as u (partition, id, attempt, from_ms, from_n, to_ms, to_n, ord)
        left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        left join lateral (
            select coalesce(a.lost_at, a.ended_at) as at, a.reason
            from (select y.lost_at, y.ended_at,
                         flowfabric.closed_as(y.disposition, y.lost, y.failure_reason, y.failure_category) as reason
                  from flowfabric.attempt y
                  where y.partition = u.partition and y.id = u.id and y.attempt_index = u.attempt
                  union all
                  select e.lease_lost_at, coalesce(e.attempt_ended_at, e.completed_at),
                         flowfabric.closed_as(e.disposition, flowfabric.lost_as(e.lease_lost_at, e.lease_revoke_reason),
                                              e.attempt_failure_reason, e.attempt_failure_category)
                  where e.attempt_index = coalesce(u.attempt, e.attempt_index)) a
            where a.reason is not null) c on true
        left join lateral (
            select f.ms, f.n, f.frames, f.durable, f.version, f.has_live, f.live_cap from flowfabric.frame f
            where f.partition = u.partition and f.id = u.id and f.attempt_index = coalesce(u.attempt, e.attempt_index, 0)
            order by f.ms desc, f.n desc limit 1) l on true
        left join lateral (
            select f.ms, f.n, f.frames, f.live_floor, f.live_cap from flowfabric.live_frame f
            where l.has_live and f.partition = u.partition and f.id = u.id
              and f.attempt_index = coalesce(u.attempt, e.attempt_index, 0)
            order by f.ms desc, f.n desc limit 1) r on true
    )
    select h.ord, null::bigint, null::integer, null::text, null::text, null::text, null::text, null::bytea, null::text,
           null::bigint, null::integer, null::bigint, h.is_known, h.attempts, h.ended, h.attempt, coalesce(h.frames, 0),
           h.live_cap, h.closed_at, h.closed_reason, greatest(h.durable - h.cap, 0)
    from head h
    union all
    select h.ord, x.ms, x.n, x.mode, x.kind, x.frame_type, x.encoding, x.payload, x.correlation_id, x.seq, x.version, x.ttl_ms,
           null, null, null, null, null, null, null, null, x.number
    from head h
    cross join lateral (
        select y.* from (
            -- Every row here has a visible frame, so that as many rows as frames are enough, and fewer are opened.
            select f.ms, (f.n - f.size + p.o)::integer as n, f.mode, f.kind, f.frame_type, f.encoding, p.payload,
                   f.correlation_ids[p.o] as correlation_id, f.seqs[p.o] as seq,
                   case f.mode when 'summary' then (f.version - f.size + p.o)::integer end as version, null::bigint as ttl_ms,
                   case f.mode when 'durable' then (f.durable - f.size + p.o)::integer else f.durable end as number
            from (select q.*, sum(q.size) over (order by q.ms, q.n) - q.size as before
                  from (select z.ms, z.n, z.size, z.mode, z.kind, z.frame_type, z.encoding, z.payloads, z.correlation_ids, z.seqs,
                               z.durable, z.version
                        from flowfabric.frame z
                        where z.partition = h.partition and z.id = h.id and z.attempt_index = h.attempt
                          and (z.ms, z.n) >= (h.from_ms, h.from_n) and z.ms <= h.to_ms and z.size > 0
                          and case z.mode when 'durable' then z.durable > h.durable - h.cap else z.version > h.version - 64 end
                        order by z.ms, z.n limit p_limit) q) f
            cross join lateral unnest(f.payloads) with ordinality as p (payload, o)
            where f.before < p_limit + 128
              and case f.mode when 'durable' then f.durable - f.size + p.o > h.durable - h.cap
                              else f.version - f.size + p.o > h.version - 64 end
            union all
            select f.ms, (f.n - f.size + p.o)::integer, 'best_effort', f.kind, f.frame_type, f.encoding, p.payload,
                   f.correlation_ids[p.o], f.seqs[p.o], null, nullif(f.ttl_ms, 0), null
            from (select q.*, sum(q.size) over (order by q.ms, q.n) - q.size as before
                  from (select z.ms, z.n, z.size, z.kind, z.frame_type, z.encoding, z.payloads, z.correlation_ids, z.seqs, z.ttl_ms,
                               z.live
                        from flowfabric.live_frame z
                        where p_live and h.has_live and z.partition = h.partition and z.id = h.id and z.attempt_index = h.attempt
                          and (z.ms, z.n) >= (h.from_ms, h.from_n) and z.ms <= h.to_ms and z.live > h.live_floor
                          and (z.ttl_ms = 0 or z.ms + 2 * z.ttl_ms >= (select floor(extract(epoch from flowfabric.now()) * 1000)))
                        order by z.ms, z.n limit p_limit) q) f
            cross join lateral unnest(f.payloads) with ordinality as p (payload, o)
            where f.before < p_limit + 128 and f.live - f.size + p.o > h.live_floor
        ) y
        where (y.ms, y.n) >= (h.from_ms, h.from_n) and (y.ms, y.n) <= (h.to_ms, h.to_n)
        order by y.ms, y.n limit p_limit) x
    order by 1, 2 nulls first, 3;
end;
$$;
