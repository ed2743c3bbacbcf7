-- report_usage_admin: count usage in one budget, without a lease
--
-- Called by operators and services. See apply_usage.
-- Locks    the budget.
-- Returns  one row.
-- Roles    operate
create or replace function flowfabric.report_usage_admin(
    p_budget uuid, p_dimensions text[], p_amounts bigint[], p_key text)
returns setof flowfabric.used
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    return query select * from flowfabric.apply_usage(
        null, false, false, array[null::integer], array[null::uuid], null, null, null, null,
        case when p_key <> '' then array[p_key] end, null, null, null, null,
        array[1], array[p_budget], array_fill(1, array[cardinality(p_dimensions)]), p_dimensions, p_amounts);
end;
$$;
