-- audit_budget_mark: A budget is marked as exhausted exactly if the hard limit of a dimension is reached.
create or replace function flowfabric.audit_budget_mark(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'budget_mark', 0, b.id, coalesce(h.exhausted, 'open')
    from flowfabric.budget b
    cross join lateral (select x as head, x.exhausted from flowfabric.budget_head x where x.budget_id = b.id
                        order by x.seq desc limit 1) h
    where p_low = 0 and h.exhausted is distinct from flowfabric.exhausted_dimension(h.head)
$$;
