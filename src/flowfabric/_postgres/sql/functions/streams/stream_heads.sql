-- stream_heads: the streams of the current attempts of executions, as the next append finds them: by the newest row of
-- each, and the newest of the ring if it ever had one there.
--
-- Called under the locks of the executions.
-- Takes    the ids of the holders, which of them to return, and the milliseconds of now: a scan reads all entries of a page
--          that match, so it first looks for recent ones.
create or replace function flowfabric.stream_heads(p_partition integer[], p_id uuid[], p_holder integer[], p_ms bigint)
returns setof flowfabric.stream_head
language sql stable as $$
    select u.holder, e.partition, e.id, e.attempt_index,
           case when r.ms is null or (l.ms, l.n) > (r.ms, r.n) then l.ms else r.ms end,
           case when r.ms is null or (l.ms, l.n) > (r.ms, r.n) then l.n else r.n end,
           coalesce(greatest(l.frames, r.frames), 0), coalesce(l.durable, 0), coalesce(l.version, 0), coalesce(l.marks, 0),
           flowfabric.stream_cap(e.policy), l.trimmed, coalesce(l.has_live, false), l.folded, l.bound,
           coalesce(r.live, 0), coalesce(r.live_floor, 0),
           case when r.ms is null or (l.ms, l.n) > (r.ms, r.n) then l.ema else r.ema end,
           case when r.ms is null or (l.ms, l.n) > (r.ms, r.n) then l.live_ms else r.live_ms end,
           case when r.ms is null or (l.ms, l.n) > (r.ms, r.n) then l.live_cap else r.live_cap end
    from unnest(p_holder) as u (holder)
    -- By key: a scan by position asks for the size of the table each time, which is a call of the system.
    join flowfabric.execution e on e.partition = p_partition[u.holder] and e.id = p_id[u.holder]
    left join lateral (
        (select f.ms, f.n, f.frames, f.durable, f.version, f.marks, f.trimmed, f.has_live, f.folded, f.bound, f.ema, f.live_ms,
                f.live_cap
         from flowfabric.frame f
         where f.partition = e.partition and f.id = e.id and f.attempt_index = e.attempt_index and f.ms >= p_ms - 250
         order by f.ms desc, f.n desc limit 1)
        union all
        (select f.ms, f.n, f.frames, f.durable, f.version, f.marks, f.trimmed, f.has_live, f.folded, f.bound, f.ema, f.live_ms,
                f.live_cap
         from flowfabric.frame f
         where f.partition = e.partition and f.id = e.id and f.attempt_index = e.attempt_index
         order by f.ms desc, f.n desc limit 1)
        limit 1) l on true
    left join lateral (
        select f.ms, f.n, f.frames, f.live, f.live_floor, f.ema, f.live_ms, f.live_cap
        from flowfabric.live_frame f
        where l.has_live and f.partition = e.partition and f.id = e.id and f.attempt_index = e.attempt_index
        order by f.ms desc, f.n desc limit 1) r on true
$$;

-- stream_cap: how many durable frames a stream keeps.
create or replace function flowfabric.stream_cap(p_policy json) returns integer
language sql immutable as $$
    select least(coalesce((p_policy -> 'stream_policy' ->> 'retention_maxlen')::bigint, 10000), 2147483647)::integer
$$;

-- has_room: whether another durable frame fits before frames beyond the cap are removed, which happens every tenth of it.
create or replace function flowfabric.has_room(p_durable integer, p_trimmed integer, p_cap integer) returns boolean
language sql immutable as $$
    select p_durable <= p_cap or p_durable < coalesce(p_trimmed, 0) + p_cap + greatest(p_cap / 10, 1)
$$;
