-- list_uncovered: the routes with waiting executions that no live worker covers, by lane and kind
--
-- Roles    read, work, operate
-- Returns  what a worker would have to serve, the namespaces whose own workers cover it, since when this is known, and how
--          many executions wait, of 10,000 at most. Executions with and without limits are one row.
create or replace function flowfabric.list_uncovered(p_limit integer)
returns table (lane text, kind text, capabilities text[], version integer, served text[], since timestamptz, waiting bigint)
language sql stable security definer as $$
    select r.lane, r.kind, r.capabilities, r.version, u.served, min(u.since), sum(w.n)::bigint
    from flowfabric.uncovered u join flowfabric.route r on r.id = u.route
    cross join lateral (
        select count(*) as n
        from (select from flowfabric.ready y
              where y.route = u.route and coalesce(y.namespace, '') <> all (u.served) limit 10000) x) w
    where w.n > 0
    group by r.lane, r.kind, r.capabilities, r.version, u.served
    order by r.lane, r.kind, r.version nulls first, r.capabilities limit p_limit
$$;
