-- audit_frame_counts: The rows of a stream count its frames without gaps or overlaps, and none is larger than it says.
create or replace function flowfabric.audit_frame_counts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'frame_counts', f.partition, f.id, f.attempt_index || '/' || f.ms || '-' || f.n
    from (select x.*, lag(x.ms) over w as before_ms, lag(x.n) over w as before_n, lag(x.frames) over w as before_frames,
                 lag(x.durable) over w as before_durable, lag(x.version) over w as before_version,
                 lag(x.marks) over w as before_marks, lag(x.trimmed) over w as before_trimmed
          from flowfabric.frame x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
          window w as (partition by x.partition, x.id, x.attempt_index order by x.ms, x.n)) f
    where cardinality(f.payloads) <> f.size or f.n < f.size - 1 or f.frames < f.durable + f.version
       or (f.ms = f.before_ms and f.n - f.size < f.before_n and f.size > 0)
       or f.frames < f.before_frames + f.size or f.marks < f.before_marks
       -- Between them rows may be missing that were removed.
       or f.durable < f.before_durable + case f.mode when 'durable' then f.size else 0 end
       or f.version < f.before_version + case f.mode when 'summary' then f.size else 0 end
       or coalesce(f.trimmed, 0) > f.durable
$$;
