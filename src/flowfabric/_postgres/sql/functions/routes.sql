-- resolve_routes: the numbers of (lane, kind, capabilities), interning what is new.
--
-- Called by create_executions. Registers an unknown lane in the same transaction.
-- Answers  one number per route given, in order; null for a route on a lane that takes no new work, or on no lane.
create or replace function flowfabric.resolve_routes(
    p_lanes text[], p_kinds text[], p_capabilities text[], p_now timestamptz) returns integer[]
language plpgsql as $$
declare
    v_routes integer[];
begin
    select array_agg(r.id order by u.ord) into v_routes
    from unnest(p_lanes, p_kinds, p_capabilities) with ordinality as u (lane, kind, capabilities, ord)
    left join flowfabric.route r on r.lane = u.lane and r.kind = u.kind and r.digest = md5(u.capabilities);

    if array_position(v_routes, null) is not null then
        insert into flowfabric.lane (name, registered_at, registered_by)
        select distinct u.lane, p_now, 'create_execution' from unnest(p_lanes) u (lane)
        where u.lane is not null and not exists (select from flowfabric.lane l where l.name = u.lane)
        order by u.lane
        on conflict do nothing;
        insert into flowfabric.route (lane, kind, capabilities, digest)
        select distinct u.lane, u.kind, case when u.capabilities = '' then '{}' else string_to_array(u.capabilities, ',') end,
               md5(u.capabilities)
        from unnest(p_lanes, p_kinds, p_capabilities) u (lane, kind, capabilities)
        join flowfabric.lane l on l.name = u.lane and l.state in ('active', 'paused')
        where not exists (select from flowfabric.route r
                          where r.lane = u.lane and r.kind = u.kind and r.digest = md5(u.capabilities))
        order by u.lane, u.kind, md5(u.capabilities)
        on conflict do nothing;
    end if;

    select array_agg(case when l.state in ('active', 'paused') then r.id end order by u.ord) into v_routes
    from unnest(p_lanes, p_kinds, p_capabilities) with ordinality as u (lane, kind, capabilities, ord)
    left join flowfabric.route r on r.lane = u.lane and r.kind = u.kind and r.digest = md5(u.capabilities)
    left join flowfabric.lane l on l.name = u.lane;
    return v_routes;
end;
$$;
