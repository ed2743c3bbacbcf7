-- find_unreported: budgets that limit sets of ended executions name and that nothing was ever reported to, by name.
--
-- For people: reads the limit sets, and one execution of each.
-- Roles    read, operate
create or replace function flowfabric.find_unreported(p_limit integer) returns table (name text)
language sql stable security definer as $$
    with named as materialized (
        select distinct n.id from flowfabric.limit_set l
        cross join lateral (select e.state from flowfabric.execution e where e.limits = l.digest
                            order by e.created_at limit 1) e
        cross join unnest(l.budget_ids) as n (id)
        where e.state in ('completed', 'failed')
    )
    select b.name
    from named n
    cross join lateral (select x.* from flowfabric.budget x where x.id = n.id limit 1) b
    cross join lateral (select h.used, h.breaches from flowfabric.budget_head h where h.budget_id = b.id order by h.seq desc limit 1) h
    where b.created_at is not null and b.owner_id is null and b.reset_count = 0 and h.breaches = 0
      and not exists (select from unnest(h.used) as u (amount) where u.amount is not null)
    order by b.name limit p_limit
$$;
