-- open_budgets: budgets have more room than before; what they hold back and may run now becomes claimable
--
-- Called under the exclusive locks of the budgets.
create or replace function flowfabric.open_budgets(p_ids uuid[], p_now timestamptz) returns void
language plpgsql as $$
begin
end;
$$;
