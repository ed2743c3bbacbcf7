-- budgets_of: the budgets of an execution.
create or replace function flowfabric.budgets_of(e flowfabric.execution) returns uuid[]
language sql stable as $$ select e.budget_ids $$;
