-- find_limits: the budgets and quota policies with these names; unknown names are left out.
--
-- Called by submissions whose options name limits that the app does not declare, also inside a caller's transaction.
-- Roles    read, submit, work, operate
create or replace function flowfabric.find_limits(p_budgets text[], p_quotas text[])
returns table (what text, name text, id uuid, key text)
language sql stable security definer as $$
    select 'budget', b.name, b.id, null::text
    from unnest(p_budgets) as u (name)
    cross join lateral (select x.name, x.id from flowfabric.budget x
                        where x.name = u.name collate "C" and x.created_at is not null limit 1) b
    union all
    select 'quota', q.name, q.id, q.key
    from unnest(p_quotas) as u (name)
    cross join lateral (select x.name, x.id, x.key from flowfabric.quota_policy x
                        where x.name = u.name collate "C" limit 1) q
$$;
