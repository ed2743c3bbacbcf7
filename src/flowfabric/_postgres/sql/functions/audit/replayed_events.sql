-- audit_replayed_events: There is one operator event per replay.
create or replace function flowfabric.audit_replayed_events(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.partition, x.id, count(*) as n
        from flowfabric.present_events(p_low, p_high) x where x.operator_type = 'replayed'
        group by x.partition, x.id
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'replayed_events', e.partition, e.id, e.replays::text
    from e left join v on v.partition = e.partition and v.id = e.id
    where coalesce(v.n, 0) <> e.replays
$$;
