-- read_last_frames: the newest durable frames of the latest attempts of executions, in order.
--
-- For views of what executions do. Best-effort frames and deltas are left out.
-- Takes    p_limit: frames of each execution at most.
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_last_frames(p_partition integer[], p_id uuid[], p_limit integer)
returns table (ordinal integer, attempt_index integer, ms bigint, n integer, mode text, kind text, frame_type text,
               encoding text, payload bytea, correlation_id text, seq bigint, summary_version integer, ttl_ms bigint)
language plpgsql stable security definer as $$
#variable_conflict use_column
begin
    return query
    select u.ord::integer, e.attempt_index, x.ms, x.n, 'durable', x.kind, x.frame_type, x.encoding, x.payload, x.correlation_id,
           x.seq, null::integer, null::bigint
    from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    cross join lateral (
        select f.ms, (f.n - f.size + p.o)::integer as n, f.kind, f.frame_type, f.encoding, p.payload,
               f.correlation_ids[p.o] as correlation_id, f.seqs[p.o] as seq
        from (select z.* from flowfabric.frame z
              where z.partition = e.partition and z.id = e.id and z.attempt_index = e.attempt_index and z.mode = 'durable'
                and z.size > 0
              order by z.ms desc, z.n desc limit p_limit) f
        cross join lateral unnest(f.payloads) with ordinality as p (payload, o)
        order by f.ms desc, f.n - f.size + p.o desc limit p_limit) x
    order by 1, 3, 4;
end;
$$;
