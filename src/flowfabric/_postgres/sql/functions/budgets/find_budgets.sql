-- find_budgets: the ids of budgets by name; unknown names are left out.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.find_budgets(p_names text[]) returns table (name text, id uuid)
language sql stable security definer as $$
    select b.name, b.id from unnest(p_names) as u (name)
    join flowfabric.budget b on b.name = u.name and b.created_at is not null
$$;
