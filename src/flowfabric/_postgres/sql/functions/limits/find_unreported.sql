-- find_unreported: budgets that limit sets of ended executions name and that nothing was ever reported to, by name.
--
-- For people: reads budgets without usage, and one execution of each limit set that names one.
-- Roles    read, operate
create or replace function flowfabric.find_unreported(p_limit integer) returns table (name text)
language sql stable security definer as $$
    select b.name
    from flowfabric.budget b
    cross join lateral (select h.used, h.breaches from flowfabric.budget_head h where h.budget_id = b.id order by h.seq desc limit 1) h
    where b.created_at is not null and b.owner_id is null and b.reset_count = 0 and h.breaches = 0
      and not exists (select from unnest(h.used) as u (amount) where u.amount is not null)
      and exists (select from flowfabric.limit_set l
                  cross join lateral (select e.state from flowfabric.execution e where e.limits = l.digest
                                      order by e.created_at limit 1) e
                  where b.id = any (l.budget_ids) and e.state in ('completed', 'failed'))
    order by b.name limit p_limit
$$;
