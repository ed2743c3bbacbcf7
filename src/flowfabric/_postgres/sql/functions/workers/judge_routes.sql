-- Verdicts: a row of `uncovered` says that no live worker covers a route, except for the namespaces in `served`. Readers
-- show the waiting executions of such a route as waiting for a capable worker (execution_view); claims do not read it, so
-- that a capable worker takes them at once, registered or not. Routes without a requirement (capabilities, a version) are
-- not judged, nor are those of executions that changed code stopped, which say so themselves.
--
-- A claim that finds nothing makes verdicts (judge_for_claim), a worker that leaves or lapses (judge_lanes), one that
-- registers with less than before, and a duty (judge_all); a worker that registers lifts them (lift_verdicts). A call that
-- makes one locks the row of the deployment and then reads the registry; a worker that registers holds a share of that lock
-- until it commits. So no verdict is made beside a registration that it does not see. Calls that make verdicts do not wait
-- for registrations.

-- judge_routes: store what is true of these routes now; returns how many verdicts changed
--
-- Without the lock, nothing is stored: another call judges, or a worker registers.
create or replace function flowfabric.judge_routes(p_routes integer[]) returns integer
language plpgsql as $$
declare
    v_now timestamptz;
    v_routes integer[];
    v_n integer;
begin
    -- Mostly nothing has changed.
    select array_agg(c.route order by c.route) into v_routes
    from flowfabric.coverage_of(p_routes, flowfabric.now()) c
    left join flowfabric.uncovered u on u.route = c.route
    where u.served is distinct from c.served;
    if v_routes is null then
        return 0;
    end if;
    perform from flowfabric.deployment d for no key update skip locked;
    if not found then
        return 0;
    end if;
    v_now := flowfabric.now();
    with found as materialized (
        select c.route, c.served from flowfabric.coverage_of(v_routes, v_now) c
    ), gone as (
        delete from flowfabric.uncovered u using found f where u.route = f.route and f.served is null
        returning 1
    ), made as (
        insert into flowfabric.uncovered as u (route, served, since)
        select f.route, f.served, v_now from found f where f.served is not null
        on conflict (route) do update set served = excluded.served where u.served <> excluded.served
        returning 1
    )
    select (select count(*) from gone) + (select count(*) from made) into v_n;
    return v_n;
end;
$$;

-- coverage_of: the namespaces whose own workers cover each route; null: a worker of all namespaces does, or the route has
-- no requirement.
create or replace function flowfabric.coverage_of(p_routes integer[], p_now timestamptz)
returns table (route integer, served text[])
language sql stable as $$
    with alive as materialized (
        select distinct g.namespace, g.service, l.lane
        from flowfabric.registration g cross join lateral unnest(g.lanes) as l (lane)
        where flowfabric.is_alive(g, p_now)
    )
    select r.id, case when (r.capabilities <> '{}' or r.version is not null) and r.not_for is null
                           and not coalesce('' = any (c.namespaces), false)
                      then coalesce(c.namespaces, '{}') end
    from flowfabric.route r
    cross join lateral (
        select array_agg(distinct a.namespace collate "C" order by a.namespace collate "C") as namespaces
        from alive a join flowfabric.service s on s.id = a.service
        where a.lane = r.lane and flowfabric.covers(s, r)) c
    where r.id = any (p_routes)
$$;

-- judge_for_claim: called by a claim that found nothing: judge up to ten routes with work that this worker cannot serve.
--
-- A registry that cannot be read must not stop claims.
create or replace function flowfabric.judge_for_claim(
    p_lane text, p_kinds text[], p_capabilities text[], p_service integer) returns void
language plpgsql as $$
begin
    perform flowfabric.judge_routes(array(
        select r.id
        from flowfabric.route r
        cross join lateral flowfabric.first_ready(r.lane, r.id) w
        where r.lane = p_lane and (r.capabilities <> '{}' or r.version is not null) and r.not_for is null
          and not ((p_kinds is null or r.kind = any (p_kinds)) and r.capabilities <@ p_capabilities
                   and (r.version is null or p_kinds is null or flowfabric.serves(p_service, r.kind, r.version, null)))
          and not exists (select from flowfabric.uncovered u where u.route = r.id)
        order by w.rank, w.created_at, w.id limit 10));
exception when others then
    raise debug 'no verdict: %', sqlerrm;
end;
$$;

-- judge_lanes: judge the routes with work of the lanes of workers that left, lapsed or serve less than before.
create or replace function flowfabric.judge_lanes(p_lanes text[]) returns void
language plpgsql as $$
begin
    perform flowfabric.judge_routes(array(
        select r.id from unnest(p_lanes) as l (lane)
        join flowfabric.route r on r.lane = l.lane and (r.capabilities <> '{}' or r.version is not null) and r.not_for is null
        where exists (select from flowfabric.uncovered u where u.route = r.id)
           or exists (select from flowfabric.first_ready(r.lane, r.id))));
end;
$$;

-- first_ready: the first ready row of a route, from its floor on.
create or replace function flowfabric.first_ready(p_lane text, p_route integer)
returns table (rank integer, created_at timestamptz, id uuid)
language sql stable as $$
    select w.rank, w.created_at, w.id
    from (select f.rank, f.created_at, f.id from flowfabric.ready_floor f
          where f.lane = p_lane and f.route = p_route order by f.rank, f.created_at, f.id limit 1) f
    cross join lateral (
        select y.rank, y.created_at, y.id from flowfabric.ready y
        where y.route = p_route and (y.rank, y.created_at, y.id) >= (f.rank, f.created_at, f.id)
        order by y.rank, y.created_at, y.id limit 1) w
$$;
