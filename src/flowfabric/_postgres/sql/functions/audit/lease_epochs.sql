-- audit_lease_epochs: Every epoch is acquired once, or spent by a suspension, in order.
create or replace function flowfabric.audit_lease_epochs(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.partition, x.id, array_agg(x.lease_epoch::bigint + (x.lease_type <> 'acquired')::integer order by x.seq) as epochs
        from flowfabric.present_events(p_low, p_high) x
        where x.lease_type in ('acquired', 'reclaimed') or (x.lease_type = 'revoked' and x.reason = 'suspend')
        group by x.partition, x.id
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'lease_epochs', e.partition, e.id, e.epoch::text
    from e left join v on v.partition = e.partition and v.id = e.id
    where coalesce(v.epochs, '{}') <> (select coalesce(array_agg(i), '{}') from generate_series(1, e.epoch) i)
$$;
