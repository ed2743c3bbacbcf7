-- exhausted_budgets: which of these budgets are exhausted, each with the first dimension whose hard limit is reached
--
-- Called by claims. Reservations do not exhaust a budget. Reads one row per budget, by its key, and locks nothing. A
-- budget that does not exist limits nothing.
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

-- hold_budgets: lock budgets in a way that excludes their opening (a reset, a raise, a release) until this transaction ends
--
-- Called before executions are moved aside under them. In the order of their ids.
-- Takes    p_wait: false: leave out those that are locked.
-- Returns  those that are locked now.
create or replace function flowfabric.hold_budgets(p_ids uuid[], p_wait boolean) returns uuid[]
language plpgsql as $$
declare
    v_ids uuid[];
begin
    if p_wait then
        with held as materialized (
            select b.id from flowfabric.budget b where b.id = any (p_ids) order by b.id for share
        )
        select array_agg(h.id) into v_ids from held h;
    else
        with held as materialized (
            select b.id from flowfabric.budget b where b.id = any (p_ids) order by b.id for share skip locked
        )
        select array_agg(h.id) into v_ids from held h;
    end if;
    return coalesce(v_ids, '{}');
end;
$$;

-- budgets_cover: whether budgets have room for the amounts that a paused execution needs.
--
-- Takes    p_ids: the budgets of the execution; p_needs: the amounts by dimension, and the budgets if they are others.
create or replace function flowfabric.budgets_cover(p_ids uuid[], p_needs jsonb) returns boolean
language sql stable as $$ select flowfabric.denying_budget(p_ids, p_needs) is null $$;

-- denying_budget: the first budget, by id, that is exhausted or has no room for these amounts, and for what the execution held
-- of it before its pause; null: none.
create or replace function flowfabric.denying_budget(p_ids uuid[], p_needs jsonb) returns uuid
language sql stable as $$
    select u.id
    from (select i.id, true as is_own from unnest(p_ids) as i (id)
          union
          select i.id::uuid, false from jsonb_array_elements_text(p_needs -> 'budgets') as i (id)) u
    cross join lateral (select x.* from flowfabric.budget_head x where x.budget_id = u.id order by x.seq desc limit 1) h
    where u.is_own and h.exhausted is not null
       or (not u.is_own or p_needs -> 'budgets' is null) and h.is_strict and exists (
           select from jsonb_each_text(p_needs -> 'amounts') as n (dim, amount)
           cross join lateral (select array_position(h.dimensions, n.dim) as place) k
           where h.hard[k.place] > 0
             and n.amount::numeric + coalesce((p_needs -> 'held' -> u.id::text ->> n.dim)::numeric, 0)
                 > h.hard[k.place]::numeric - coalesce(h.used[k.place], 0) - h.held[k.place])
    order by u.id limit 1
$$;
