-- audit_signal_events: There is one event per signal, beside those of repetitions and refusals.
create or replace function flowfabric.audit_signal_events(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.partition, x.id, count(*) as n
        from flowfabric.present_events(p_low, p_high) x where x.signal_effect not in ('deduped', 'refused')
        group by x.partition, x.id
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'signal_events', e.partition, e.id, null
    from e left join v on v.partition = e.partition and v.id = e.id
    where coalesce(v.n, 0) <> (select count(*) from flowfabric.signal g
                               where g.partition = e.partition and g.id = e.id and g.source_type <> 'system')
$$;
