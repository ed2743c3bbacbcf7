-- audit_verdict_facts: A verdict that no live worker covers a route is about a route with a requirement that none covers.
create or replace function flowfabric.audit_verdict_facts(
    p_low integer, p_high integer, p_from uuid, p_to uuid, p_now timestamptz) returns setof flowfabric.violation
language sql stable as $$
    select 'verdict_facts', null::integer, null::uuid, u.route || ' ' || u.served::text
    from flowfabric.uncovered u
    -- A worker that had lapsed when the verdict was made is alive again after the clock was set back.
    left join flowfabric.coverage_of(
        array(select x.route from flowfabric.uncovered x),
        greatest(p_now, (select max(x.since) from flowfabric.uncovered x))) c on c.route = u.route
    where c.served is null or not c.served <@ u.served   -- the workers of a namespace may have lapsed since
       or u.served <> array(select distinct n collate "C" from unnest(u.served) as n order by 1)
$$;
