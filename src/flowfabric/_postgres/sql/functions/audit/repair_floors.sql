-- repair_floors: give routes whose first ready row no floor covers a floor there, and take the floor from routes without one
--
-- Called by the audit duty. No other call leaves a ready row without a floor; one that did would hide work from every
-- claim. Floors without ready rows are removed by the claims that visit the route; no other call removes one of a version
-- that no worker serves any more. The cost depends on p_limit and on dead rows, not on what is stored.
-- Takes    p_limit: how many routes to look at, chosen at random.
-- Returns  the first ready row of each route that was repaired.
-- Roles    work, operate
create or replace function flowfabric.repair_floors(p_limit integer) returns table (partition integer, id uuid)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_from integer := 1 + floor(random() * greatest(0, (select max(r.id) from flowfabric.route r) - p_limit + 1))::integer;
    v record;
begin
    for v in
        select q.lane, array_agg(q.id) as routes
        from (select r.* from flowfabric.route r where r.id >= v_from order by r.id limit p_limit) q
        cross join lateral (select from flowfabric.ready_floor o where o.lane = q.lane and o.route = q.id limit 1) f
        where num_nonnulls(q.version, q.not_for) > 0
          and (select r.id from flowfabric.ready r where r.route = q.id
               order by r.rank, r.created_at, r.id limit 1) is null
        group by q.lane
    loop
        perform flowfabric.raise_floors(v.lane, v.routes);
    end loop;
    return query
    with uncovered as (
        select q.lane, f.*
        from (select r.id, r.lane from flowfabric.route r where r.id >= v_from order by r.id limit p_limit) q
        cross join lateral (
            select r.route, r.rank, r.created_at, r.id, r.partition from flowfabric.ready r where r.route = q.id
            order by r.rank, r.created_at, r.id limit 1) f
        left join lateral (select true as covers from flowfabric.ready_floor o where o.lane = q.lane and o.route = f.route
                           and (o.rank, o.created_at, o.id) <= (f.rank, f.created_at, f.id) limit 1) o on true
        where o.covers is null
    ), covered as (
        insert into flowfabric.ready_floor (lane, route, rank, created_at, id)
        select u.lane, u.route, u.rank, u.created_at, u.id from uncovered u
    )
    select u.partition, u.id from uncovered u;
end;
$$;
