-- resolve_routes: the numbers of (lane, kind, capabilities, limited), creating new ones.
--
-- Called by create_executions. Registers an unknown lane in the same transaction.
-- Locks    with a new route: the row `deployment`, for key share, unless it is locked (limits/free_routes.sql).
-- Takes    p_limited: null: none is for executions with limits.
-- Returns  one number per route given, in order; null for a route on a closed lane, or on no lane.
create or replace function flowfabric.resolve_routes(
    p_lanes text[], p_kinds text[], p_capabilities text[], p_limited boolean[], p_now timestamptz) returns integer[]
language plpgsql as $$
declare
    v_routes integer[];
    v_new boolean;
    v_frees boolean;   -- no binding is being stored, and this transaction sees those that are
begin
    for v_try in 1 .. 2 loop
        select array_agg(case when l.state in ('active', 'paused') then r.id end order by u.ord),
               coalesce(bool_or(u.lane is not null and (l.name is null or (r.id is null and l.state in ('active', 'paused')))),
                        false)
        into v_routes, v_new
        from unnest(p_lanes, p_kinds, p_capabilities, p_limited) with ordinality as u (lane, kind, capabilities, limited, ord)
        left join flowfabric.lane l on l.name = u.lane
        left join flowfabric.route r on r.lane = u.lane and r.kind = u.kind
                  and r.digest = flowfabric.route_digest(u.capabilities, u.limited);
        exit when not v_new or v_try = 2;

        perform from flowfabric.deployment d for key share skip locked;
        v_frees := found and current_setting('transaction_isolation') = 'read committed';
        insert into flowfabric.lane (name, registered_at, registered_by)
        select distinct u.lane, p_now, 'create_execution' from unnest(p_lanes) u (lane)
        where u.lane is not null and not exists (select from flowfabric.lane l where l.name = u.lane)
        order by u.lane
        on conflict do nothing;
        insert into flowfabric.route (lane, kind, capabilities, limited, digest, is_free)
        select distinct u.lane, u.kind, case when u.capabilities = '' then '{}' else string_to_array(u.capabilities, ',') end,
               coalesce(u.limited, false), d.digest, v_frees and u.limited is not true and not flowfabric.is_bound(u.lane, u.kind)
        from unnest(p_lanes, p_kinds, p_capabilities, p_limited) u (lane, kind, capabilities, limited)
        cross join lateral (select flowfabric.route_digest(u.capabilities, u.limited) as digest) d
        join flowfabric.lane l on l.name = u.lane and l.state in ('active', 'paused')
        where not exists (select from flowfabric.route r
                          where r.lane = u.lane and r.kind = u.kind and r.digest = d.digest)
        order by u.lane, u.kind, d.digest
        on conflict do nothing;
    end loop;
    return v_routes;
end;
$$;

-- route_digest: the digest by which the routes of a lane and a kind differ, without version and code. create_plain writes it out.
create or replace function flowfabric.route_digest(p_capabilities text, p_limited boolean) returns text
language sql immutable as $$
    select case when p_limited then md5(p_capabilities) || ' limited' else md5(p_capabilities) end
$$;

-- is_bound: whether a binding is by this lane or kind alone, so that submissions with nothing else get a limit.
create or replace function flowfabric.is_bound(p_lane text, p_kind text) returns boolean
language sql stable as $$
    select exists (select from unnest(array['kind ' || p_kind, 'lane ' || p_lane]) as a (anchor)
                   cross join lateral (select x.* from flowfabric.limit_binding x
                                       where x.anchor = left(a.anchor, 200) collate "C" offset 0) b
                   where num_nonnulls(b.namespace, b.tag, b.flow_kind) = 0
                     and (b.lane is null or b.lane = p_lane) and (b.kind is null or b.kind = p_kind))
$$;
