-- audit_budget_ledger: The ledger of the current generation of a budget has no more than was used.
create or replace function flowfabric.audit_budget_ledger(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'budget_ledger', 0, s.budget_id, format('%s: %s in the ledger', s.dimension, sum(s.amount))
    from flowfabric.budget_spend s
    cross join lateral (select x.* from flowfabric.budget_head x where x.budget_id = s.budget_id
                        order by x.seq desc limit 1) h
    where p_low = 0 and s.generation = h.generation
    group by s.budget_id, s.dimension, h.used[array_position(h.dimensions, s.dimension)]
    having sum(s.amount) > coalesce(h.used[array_position(h.dimensions, s.dimension)], 0)
$$;
