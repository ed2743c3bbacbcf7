-- read_stream_summary: the summary document of an attempt, and how many deltas made it; no row without one.
--
-- Takes    p_attempt: null means the latest.
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_stream_summary(p_partition integer, p_id uuid, p_attempt integer)
returns table (attempt_index integer, document text, version integer, first_ms bigint, last_ms bigint)
language sql stable security definer as $$
    select a.attempt, flowfabric.document_of(p_partition, p_id, a.attempt)::text,
           l.version, coalesce(s.first_ms, f.ms), l.ms
    from (select coalesce(p_attempt, (select e.attempt_index from flowfabric.execution e
                                      where e.partition = p_partition and e.id = p_id)) as attempt) a
    cross join lateral (
        select x.version, x.ms from flowfabric.frame x
        where x.partition = p_partition and x.id = p_id and x.attempt_index = a.attempt and x.mode = 'summary'
        order by x.version desc limit 1) l
    cross join lateral (
        select x.ms from flowfabric.frame x
        where x.partition = p_partition and x.id = p_id and x.attempt_index = a.attempt and x.mode = 'summary'
        order by x.version limit 1) f
    left join flowfabric.summary s on s.partition = p_partition and s.id = p_id and s.attempt_index = a.attempt
$$;
