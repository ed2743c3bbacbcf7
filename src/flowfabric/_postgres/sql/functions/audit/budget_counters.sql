-- audit_budget_counters: The counters of breaches never decrease, and neither does the generation.
create or replace function flowfabric.audit_budget_counters(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'budget_counters', 0, h.budget_id, h.seq::text
    from flowfabric.budget_head h
    join flowfabric.budget_head n on n.budget_id = h.budget_id and n.seq = h.seq + 1
    where p_low = 0 and (n.breaches < h.breaches or n.soft_breaches < h.soft_breaches or n.generation < h.generation)
$$;
