-- audit_ready_below_floor: No ready row lies below the floor of its route, and none is in a route without a floor: a claim
-- would never see it.
create or replace function flowfabric.audit_ready_below_floor(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'ready_below_floor', r.partition, r.id, null from flowfabric.ready r
    join flowfabric.route q on q.id = r.route
    left join lateral (select true as covers from flowfabric.ready_floor f where f.lane = q.lane and f.route = r.route
                       and (f.rank, f.created_at, f.id) <= (r.rank, r.created_at, r.id) limit 1) f on true
    where r.partition between p_low and p_high and f.covers is null
$$;
