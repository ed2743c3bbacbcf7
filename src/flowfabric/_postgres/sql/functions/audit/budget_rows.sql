-- audit_budget_rows: A created budget has running numbers of its limits; numbers, keys, entries and reservations have a budget.
create or replace function flowfabric.audit_budget_rows(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'budget_rows', 0, o.id, o.what
    from (select h.budget_id as id, 'numbers' as what from flowfabric.budget_head h
          union select k.budget_id, 'key' from flowfabric.budget_key k
          union select s.budget_id, 'ledger' from flowfabric.budget_spend s
          union select r.budget_id, 'reservation' from flowfabric.reservation r where r.state = 'held') o
    where p_low = 0 and not exists (select from flowfabric.budget b where b.id = o.id offset 0)
    union all
    select 'budget_rows', 0, b.id, 'limits'
    from flowfabric.budget b
    left join lateral (select x.* from flowfabric.budget_head x where x.budget_id = b.id order by x.seq desc limit 1) h on true
    where p_low = 0 and b.created_at is not null
      and (h.budget_id is null or h.generation <> b.generation or h.is_strict <> (b.mode = 'strict')
           or exists (select from unnest(b.dimensions, b.hard, b.soft) as d (dim, hard, soft)
                      where h.hard[array_position(h.dimensions, d.dim)] is distinct from d.hard
                         or h.soft[array_position(h.dimensions, d.dim)] is distinct from d.soft))
$$;
