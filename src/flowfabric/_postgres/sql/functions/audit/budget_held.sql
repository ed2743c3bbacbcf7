-- audit_budget_held: The amount held of a budget is the sum of its reservations that are held.
create or replace function flowfabric.audit_budget_held(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'budget_held', 0, coalesce(q.id, r.id), format('%s: holds %s, reserved %s', coalesce(q.dim, r.dim), q.held, r.held)
    from (select b.id, d.dim, d.held from flowfabric.budget b
          cross join lateral (select x.* from flowfabric.budget_head x where x.budget_id = b.id order by x.seq desc limit 1) h
          cross join lateral unnest(h.dimensions, h.held) as d (dim, held) where d.held <> 0) q
    full join (select s.budget_id as id, d.dim, sum(d.amount) as held from flowfabric.reservation s
               cross join lateral unnest(s.dimensions, s.amounts) as d (dim, amount)
               where s.state = 'held' group by 1, 2 having sum(d.amount) <> 0) r on r.id = q.id and r.dim = q.dim
    where p_low = 0 and q.held is distinct from r.held
$$;
