-- read_budgets: budgets by id; those that were never created are left out.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_budgets(p_ids uuid[]) returns setof flowfabric.budget_view
language sql stable security definer as $$
    select v.* from unnest(p_ids) with ordinality as u (id, ord)
    join flowfabric.budget_view v on v.id = u.id and v.created_at is not null
    order by u.ord
$$;
