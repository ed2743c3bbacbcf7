-- budgets_of: the budgets of an execution, by its limit set; null: none.
create or replace function flowfabric.budgets_of(e flowfabric.execution) returns uuid[]
language sql stable as $$
    select l.budget_ids from flowfabric.limit_set l where l.digest = e.limits limit 1
$$;
