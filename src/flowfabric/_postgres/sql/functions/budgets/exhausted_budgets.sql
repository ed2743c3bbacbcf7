-- exhausted_budgets: which of these budgets are exhausted, each with its first exhausted dimension
--
-- Called by claims. No locks; one look-up for each budget. A budget that does not exist limits nothing.
create or replace function flowfabric.exhausted_budgets(p_ids uuid[])
returns table (budget_id uuid, dimension text, used bigint, hard bigint)
language plpgsql stable as $$
begin
    return;
end;
$$;

-- hold_budgets: lock budgets in a way that excludes their opening (a reset, a raise, a release) until this transaction ends
--
-- Called before executions are moved aside under them. In the order of their ids.
-- Takes    p_wait: false: leave out those that are locked.
-- Returns  those that are locked now.
create or replace function flowfabric.hold_budgets(p_ids uuid[], p_wait boolean) returns uuid[]
language plpgsql as $$
begin
    return p_ids;
end;
$$;

-- budgets_cover: whether these budgets have room for the amounts that a paused execution needs.
create or replace function flowfabric.budgets_cover(p_ids uuid[], p_needs jsonb) returns boolean
language plpgsql stable as $$
begin
    return true;
end;
$$;
