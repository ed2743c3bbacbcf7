-- audit_derived_route: The route of an execution's version is its own with a version; that of the code that stopped it is
-- the same without this code.
create or replace function flowfabric.audit_derived_route(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
          and num_nonnulls(x.pinned, x.stop_route) > 0
    )
    select 'derived_route', e.partition, e.id, concat_ws(' ', e.route, e.pinned, e.stop_route)
    from e join flowfabric.route r on r.id = e.route
    left join flowfabric.route p on p.id = e.pinned
    left join flowfabric.route s on s.id = e.stop_route
    where not coalesce(e.pinned is null or (
              (p.lane, p.kind, p.capabilities, p.limited) = (r.lane, r.kind, r.capabilities, r.limited) and p.version > 0 and p.not_for is null
              and e.attempts > 0), false)
       or not coalesce(e.stop_route is null or (
              (s.lane, s.kind, s.capabilities, s.limited) = (r.lane, r.kind, r.capabilities, r.limited) and s.version is not distinct from p.version
              and s.not_for = array(select d from unnest(e.stop_digests) as d order by d collate "C")), false)
$$;
