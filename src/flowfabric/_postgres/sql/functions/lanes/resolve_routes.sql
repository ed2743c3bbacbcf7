-- resolve_routes: the numbers of (lane, kind, capabilities), creating new ones.
--
-- Called by create_executions. Registers an unknown lane in the same transaction.
-- Returns  one number per route given, in order; null for a route on a closed lane, or on no lane.
create or replace function flowfabric.resolve_routes(
    p_lanes text[], p_kinds text[], p_capabilities text[], p_now timestamptz) returns integer[]
language plpgsql as $$
declare
    v_routes integer[];
    v_new boolean;
begin
    for v_try in 1 .. 2 loop
        select array_agg(case when l.state in ('active', 'paused') then r.id end order by u.ord),
               coalesce(bool_or(u.lane is not null and (l.name is null or (r.id is null and l.state in ('active', 'paused')))),
                        false)
        into v_routes, v_new
        from unnest(p_lanes, p_kinds, p_capabilities) with ordinality as u (lane, kind, capabilities, ord)
        left join flowfabric.lane l on l.name = u.lane
        left join flowfabric.route r on r.lane = u.lane and r.kind = u.kind and r.digest = md5(u.capabilities);
        exit when not v_new or v_try = 2;

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
    end loop;
    return v_routes;
end;
$$;
