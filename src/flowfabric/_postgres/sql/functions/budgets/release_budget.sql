-- release_budget: take what the ledger has for an execution in this generation off the usage, and delete its entries
--
-- Called by operators and services. Without entries nothing changes; other executions are never affected.
-- Locks    the budget; then what it holds back, skipping what is locked.
-- Returns  how many entries were deleted.
-- Roles    operate
create or replace function flowfabric.release_budget(p_id uuid, p_execution uuid) returns integer
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_before flowfabric.budget_head[];
    h flowfabric.budget_head;
    v_count integer := 0;
    v_changed boolean := false;
    s record;
    k integer;
begin
    perform flowfabric.require_read_committed();
    v_before := flowfabric.lock_budgets(array[p_id], false);
    v_now := flowfabric.now();
    h := v_before[1];
    for s in delete from flowfabric.budget_spend x where x.budget_id = p_id and x.execution_id = p_execution
             returning x.generation, x.dimension, x.amount loop
        v_count := v_count + 1;
        k := array_position(h.dimensions, s.dimension);
        if s.generation = h.generation and h.used[k] > 0 and s.amount > 0 then
            h.used[k] := greatest(h.used[k] - s.amount, 0);
            v_changed := true;
        end if;
    end loop;
    if v_changed then
        perform flowfabric.write_heads(v_before, array[h], array[1], v_now);
        perform flowfabric.open_budgets(array[p_id], v_now);
    end if;
    return v_count;
end;
$$;
