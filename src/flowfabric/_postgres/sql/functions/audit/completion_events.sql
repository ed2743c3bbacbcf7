-- audit_completion_events: There is one completion event per end; each replay undid one.
create or replace function flowfabric.audit_completion_events(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.partition, x.id, count(*) as n, string_agg(x.outcome, ',' order by x.seq) as outcomes
        from flowfabric.present_events(p_low, p_high) x where x.outcome is not null
        group by x.partition, x.id
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'completion_events', e.partition, e.id, v.outcomes
    from e left join v on v.partition = e.partition and v.id = e.id
    where coalesce(v.n, 0) <> e.replays + case when e.completed_at is null then 0 else 1 end
$$;
