-- exhausted_budgets: which budgets of a list are exhausted, with the first dimension whose hard limit is reached
--
-- Called by claims. What is held does not exhaust a budget. Reads one row per budget, by its key, and locks nothing.
create or replace function flowfabric.exhausted_budgets(p_ids uuid[])
returns table (budget_id uuid, dimension text, used bigint, hard bigint)
language sql stable as $$
    select u.id, h.exhausted, h.used[array_position(h.dimensions, h.exhausted)],
           h.hard[array_position(h.dimensions, h.exhausted)]
    from unnest(p_ids) as u (id)
    cross join lateral (select x.exhausted, x.used, x.hard, x.dimensions from flowfabric.budget_head x
                        where x.budget_id = u.id order by x.seq desc limit 1) h
    where h.exhausted is not null
$$;
