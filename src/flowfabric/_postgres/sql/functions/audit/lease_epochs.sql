-- audit_lease_epochs: Every epoch is acquired once, or spent by a suspension, in order.
create or replace function flowfabric.audit_lease_epochs(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.* from flowfabric.event x where x.partition between p_low and p_high
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'lease_epochs', e.partition, e.id, e.epoch::text from e
    where (select coalesce(array_agg(v.lease_epoch + (v.lease_type = 'revoked')::integer order by v.seq), '{}') from v
           where v.partition = e.partition and v.id = e.id
             and (v.lease_type in ('acquired', 'reclaimed') or (v.lease_type = 'revoked' and v.reason = 'suspend')))
          <> (select coalesce(array_agg(i), '{}') from generate_series(1, e.epoch) i)
$$;
