-- audit_lane_registered: Every execution has a route, and its lane is registered.
create or replace function flowfabric.audit_lane_registered(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'lane_registered', e.partition, e.id, e.route::text from e
    where not exists (select from flowfabric.route r join flowfabric.lane l on l.name = r.lane where r.id = e.route)
$$;
