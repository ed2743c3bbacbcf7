-- list_spend: the ledger of a budget, in the order of executions, generations and dimensions
--
-- Takes    p_execution: only of this one; p_after: the last entry seen, null for the beginning.
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_spend(
    p_budget uuid, p_execution uuid, p_after_id uuid, p_after_generation integer, p_after_dimension text, p_limit integer)
returns table (execution_id uuid, generation integer, dimension text, amount bigint, recorded_at timestamptz)
language sql stable security definer as $$
    select s.execution_id, s.generation, s.dimension, s.amount, s.recorded_at
    from flowfabric.budget_spend s
    where s.budget_id = p_budget and (p_execution is null or s.execution_id = p_execution)
      and (p_after_id is null or (s.execution_id, s.generation, s.dimension) > (p_after_id, p_after_generation, p_after_dimension))
    order by s.execution_id, s.generation, s.dimension limit p_limit
$$;
