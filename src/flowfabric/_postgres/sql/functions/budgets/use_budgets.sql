-- use_budgets: report usage, reserve, settle and cancel, for many executions in one call
--
-- Called by the workers that hold the leases. See apply_usage.
-- Locks    the executions, by partition and id; then the budgets, by id.
-- Returns  one row per item.
-- Roles    work, operate
create or replace function flowfabric.use_budgets(
    p_op text[], p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_key text[], p_name text[], p_n integer[], p_reservation uuid[], p_on_lost text[],
    p_budget_item integer[], p_budget uuid[], p_amount_item integer[], p_dimension text[], p_amount bigint[])
returns setof flowfabric.used
language plpgsql security definer as $$
begin
    perform flowfabric.require_read_committed();
    if exists (select from unnest(p_op) as u (op) where u.op not in ('report', 'reserve', 'settle', 'cancel'))
       or exists (select from unnest(p_on_lost) as u (word) where u.word not in ('charge', 'release'))
       or exists (select from unnest(p_op, p_reservation) as u (op, id)
                  where u.op <> 'report' and u.id is null)
       or exists (select from unnest(p_name, p_n) as u (name, n)
                  where u.name is not null and (u.n is null or octet_length(u.name) not between 1 and 512)) then
        raise exception 'an unknown word, or a reservation without an id' using errcode = 'invalid_parameter_value';
    end if;
    return query select * from flowfabric.apply_usage(
        p_op, true, false, p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, p_key, p_name, p_n, p_reservation,
        p_on_lost, p_budget_item, p_budget, p_amount_item, p_dimension, p_amount);
end;
$$;
