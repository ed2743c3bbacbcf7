-- audit_event_route: Events have the route of their execution.
create or replace function flowfabric.audit_event_route(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with v as materialized (
        select x.* from flowfabric.present_events(p_low, p_high) x
    ), e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'event_route', v.partition, v.id, v.route::text from v
    join e on e.partition = v.partition and e.id = v.id where v.route is distinct from e.route
$$;
