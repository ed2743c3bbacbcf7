-- record_spend: count usage in one budget, without a lease, and add it to the ledger of an execution
--
-- Called by operators and services. The execution need not exist. See apply_usage.
-- Locks    the budget.
-- Returns  one row.
-- Roles    operate
create or replace function flowfabric.record_spend(
    p_budget uuid, p_partition integer, p_id uuid, p_dimensions text[], p_amounts bigint[], p_key text)
returns setof flowfabric.used
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    return query select * from flowfabric.apply_usage(
        null, false, true, array[p_partition], array[p_id], null, null, null, null,
        case when p_key <> '' then array[p_key] end, null, null, null, null,
        array[1], array[p_budget], array_fill(1, array[cardinality(p_dimensions)]), p_dimensions, p_amounts);
end;
$$;
