-- audit_leased_last_event: The latest lease event agrees with whether the execution is leased.
create or replace function flowfabric.audit_leased_last_event(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.partition, x.id, (array_agg(x.lease_type order by x.seq desc))[1] as lease_type
        from flowfabric.present_events(p_low, p_high) x where x.lease_type is not null
        group by x.partition, x.id
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'leased_last_event', e.partition, e.id, e.state
    from e left join v on v.partition = e.partition and v.id = e.id
    where e.epoch > 0 and (e.state = 'active' and e.lease_lost is null)
          is distinct from coalesce(v.lease_type in ('acquired', 'reclaimed', 'renewed'), false)
$$;
