-- list_failures: executions that ended without success, grouped by kind, state, error type and normalised text
--
-- Looks at the p_most that ended last, in these states.
-- Takes    p_namespaces: only these; the other filters as `find`.
-- Returns  the groups, the largest first; each with how many were looked at, whether these were all, and the one that ended
--          last: its id, when, and its text in one line.
-- Roles    read, operate
create or replace function flowfabric.list_failures(
    p_namespaces text[], p_lanes text[], p_kinds text[], p_states text[], p_tag_key text, p_tag_value text,
    p_from timestamptz, p_to timestamptz, p_most integer, p_limit integer)
returns table (kind text, state text, error_type text, message text, n bigint, last_ended_at timestamptz, last_id uuid,
               last_text text, examined bigint, is_complete boolean)
language sql stable security definer as $$
    with ended as materialized (
        select w.state, w.ended_at, w.id, w.partition
        from unnest(p_states) s (state)
        cross join lateral (select x.state, x.ended_at, x.id, x.partition from flowfabric.unsuccessful x
                            where x.state = s.state
                            order by x.ended_at desc, x.id desc, x.partition desc limit p_most + 1) w
        order by w.ended_at desc, w.id desc, w.partition desc limit p_most + 1
    ), found as materialized (
        select e.kind, d.state, d.ended_at, d.id, e.has_trace, flowfabric.failure_line(e.reason) as line
        from (select x.* from ended x order by x.ended_at desc, x.id desc, x.partition desc limit p_most) d
        cross join lateral (
            select r.kind, coalesce(x.failure_reason, x.cancellation_reason, x.failure_category, '') as reason,
                   x.failure_reason like '%Traceback (most recent call last):%' as has_trace
            from flowfabric.execution x join flowfabric.route r on r.id = x.route
            where x.partition = d.partition and x.id = d.id
              and (p_namespaces is null or x.namespace = any (p_namespaces))
              and (p_lanes is null or r.lane = any (p_lanes)) and (p_kinds is null or r.kind = any (p_kinds))
              and (p_tag_key is null or coalesce(x.tags ->> p_tag_key = p_tag_value, false))
              and (p_from is null or x.created_at >= p_from) and (p_to is null or x.created_at < p_to) offset 0) e
    ), typed as (
        select f.*, case when f.has_trace then substring(f.line from '^((?:[[:alpha:]_]\w*|<locals>)(?:\.(?:\w+|<locals>))*)(?:: |$)') end as error_type
        from found f
    )
    select t.kind, t.state, t.error_type, m.message, count(*), max(t.ended_at), (array_agg(t.id order by t.ended_at desc, t.id desc))[1],
           (array_agg(t.line order by t.ended_at desc, t.id desc))[1], (select count(*) from found),
           (select count(*) from ended) <= p_most
    from typed t
    cross join lateral (
        select flowfabric.normal_text(case when t.error_type is null then t.line
                                           else substr(t.line, length(t.error_type) + 3) end) as message) m
    group by t.kind, t.state, t.error_type, m.message
    order by count(*) desc, max(t.ended_at) desc, t.kind, m.message limit p_limit
$$;

-- failure_line: a failure in one line: that of a traceback which names the exception, else the first; sealed ones all alike.
create or replace function flowfabric.failure_line(p_text text) returns text
language sql immutable as $$
    select left(btrim(case
        when p_text like '[sealed %' then '[sealed]'
        when p_text ~ '^\s*Traceback ' then coalesce(
            (regexp_match(p_text, '^.*\n[ \t]+[^\n]*\n([^ \t\n][^\n]*)'))[1], substring(p_text from '\S[^\n]*'))
        else substring(left(p_text, 4000) from '\S[^\n]*') end), 500)
$$;

-- normal_text: a message without what differs from case to case: ids, addresses, numbers.
create or replace function flowfabric.normal_text(p_text text) returns text
language sql immutable as $$
    select regexp_replace(regexp_replace(regexp_replace(left(coalesce(p_text, ''), 300),
        '\m[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\M', '<id>', 'gi'),
        '\m(?:0x[0-9a-f]+|(?=[a-f]*[0-9])[0-9a-f]{12,})\M', '<hex>', 'gi'),
        '[0-9]+(?:[.,][0-9]+)*', '<n>', 'g')
$$;
