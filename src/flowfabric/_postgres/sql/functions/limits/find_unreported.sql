-- find_unreported: budgets that ended executions had and that nothing was ever reported to, by name
--
-- For people: looks at up to 1,000 limit sets, and the first execution of each.
-- Roles    read, operate
create or replace function flowfabric.find_unreported(p_limit integer) returns table (name text)
language sql stable security definer as $$
    with ended as materialized (
        select distinct u.id
        from (select x.digest, x.budget_ids from flowfabric.limit_set x order by x.digest limit 1000) l
        cross join lateral (select y.state from flowfabric.execution y where y.limits = l.digest
                            order by y.created_at, y.id limit 1) e
        cross join lateral unnest(l.budget_ids) as u (id)
        where e.state in ('completed', 'failed')
    )
    select b.name
    from ended d
    cross join lateral (select x.* from flowfabric.budget x where x.id = d.id offset 0) b
    cross join lateral (select x.used, x.breaches from flowfabric.budget_head x where x.budget_id = b.id
                        order by x.seq desc limit 1) h
    where b.created_at is not null and b.owner_id is null and b.reset_count = 0 and h.breaches = 0
      and not exists (select from unnest(h.used) as u (amount) where u.amount is not null)
    order by b.name limit p_limit
$$;
