-- Verdicts: a row of `uncovered` says that no live worker covers a route, except for the namespaces in `served`. Readers
-- show the waiting executions of such a route as waiting for a capable worker (execution_view); claims do not read it, so
-- that a capable worker takes them at once, registered or not. Routes without a requirement (capabilities, a version) are
-- not judged, nor are those of executions that changed code stopped, which say so themselves.
--
-- A claim that finds nothing makes verdicts (judge_for_claim), a worker that leaves or lapses (judge_lanes), one that
-- registers with less than before, and a duty (judge_all); a worker that registers lifts them (lift_verdicts). Whoever
-- makes one locks the row of the deployment and then reads the registry; a worker that registers holds a share of that lock
-- until it commits. So no verdict is made beside a registration that it does not see. Those who make verdicts never wait.

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
        select q.route
        from (select f.route, min(f.rank) as rank, min(f.created_at) as created_at
              from flowfabric.ready_floor f join flowfabric.route r on r.id = f.route
              where f.lane = p_lane and (r.capabilities <> '{}' or r.version is not null) and r.not_for is null
                and not ((p_kinds is null or r.kind = any (p_kinds)) and r.capabilities <@ p_capabilities
                         and (r.version is null or p_kinds is null
                              or flowfabric.serves(p_service, r.kind, r.version, null)))
                and not exists (select from flowfabric.uncovered u where u.route = f.route)
              group by f.route
              order by rank, created_at limit 10) q));
exception when others then
    raise debug 'no verdict: %', sqlerrm;
end;
$$;

-- judge_lanes: judge the routes with work of the lanes of workers that left, lapsed or serve less than before.
create or replace function flowfabric.judge_lanes(p_lanes text[]) returns void
language plpgsql as $$
begin
    perform flowfabric.judge_routes(array(
        select distinct f.route from flowfabric.ready_floor f where f.lane = any (p_lanes)
        union
        select u.route from flowfabric.uncovered u join flowfabric.route r on r.id = u.route
        where r.lane = any (p_lanes)));
end;
$$;

-- judge_all: judge every route that has work, and forget the verdicts on others; returns how many changed
--
-- Called by the duty unblock. If the registry cannot be read, all verdicts are forgotten.
-- Roles    work, operate
create or replace function flowfabric.judge_all() returns integer
language plpgsql security definer as $$
declare
    v_n integer;
    v_forgotten integer;
begin
    perform flowfabric.require_read_committed();
    delete from flowfabric.uncovered u where u.route = any (array(
        select x.route from flowfabric.uncovered x
        where not exists (select from flowfabric.ready r where r.route = x.route)
        order by x.route for update skip locked));
    get diagnostics v_forgotten = row_count;
    begin
        v_n := flowfabric.judge_routes(array(
            select distinct f.route from flowfabric.ready_floor f
            where exists (select from flowfabric.ready r where r.route = f.route)
            union
            select u.route from flowfabric.uncovered u));
    exception when others then
        delete from flowfabric.uncovered u where true;
        get diagnostics v_n = row_count;
    end;
    return v_n + v_forgotten;
end;
$$;

-- lift_verdicts: a worker has registered: lift the verdicts on what it covers
--
-- Waits for a call that judges. Called under the lock of the registration.
create or replace function flowfabric.lift_verdicts(g flowfabric.registration) returns void
language plpgsql as $$
declare
    v_routes integer[];
begin
    perform from flowfabric.deployment d for share;
    select array_agg(q.route) into v_routes
    from (select u.route from flowfabric.uncovered u
          join flowfabric.route r on r.id = u.route and r.lane = any (g.lanes)
          join flowfabric.service s on s.id = g.service
          where flowfabric.covers(s, r) and g.namespace <> all (u.served)
          order by u.route for update of u) q;
    if v_routes is null then
        return;
    elsif g.namespace = '' then
        delete from flowfabric.uncovered u where u.route = any (v_routes);
    else
        update flowfabric.uncovered u
        set served = array(select n from unnest(u.served || g.namespace) as n order by n collate "C")
        where u.route = any (v_routes);
    end if;
end;
$$;

-- is_uncovered: whether readers see that an execution, which waits for a worker, waits for a capable one.
create or replace function flowfabric.is_uncovered(e flowfabric.execution, p_now timestamptz) returns boolean
language sql stable as $$
    select e.state in ('waiting', 'resumable') and e.blocking_reason = 'waiting_for_worker'
       and exists (select from flowfabric.uncovered u
                   where u.route = flowfabric.ready_route(e) and e.namespace <> all (u.served))
       and not exists (select from flowfabric.claim_grant g
                       where g.partition = e.partition and g.id = e.id and g.expires_at > p_now)
$$;
