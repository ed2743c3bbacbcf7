-- usage_budgets: the budgets of the items of a call
--
-- Called by apply_usage, under the locks of the executions. Those that an item names; for a report or reservation without
-- names those of its execution; for a settlement, or a reservation that exists, those that it holds.
-- Returns  ids: all of them, sorted; missing: whether some are unknown; items and numbers: which item has which budget, as
--          its position in ids, in this order.
create or replace function flowfabric.usage_budgets(
    p_op text[], p_fenced boolean, p_partition integer[], p_id uuid[], p_name text[], p_n integer[], p_reservation uuid[],
    p_budget_item integer[], p_budget uuid[], out items integer[], out numbers integer[], out ids uuid[], out missing boolean)
language plpgsql stable as $$
declare
    v_reserves boolean := coalesce(array['reserve', 'settle', 'cancel'] && p_op, false);
begin
    if cardinality(p_budget_item) <> cardinality(p_budget) then
        raise exception 'each budget has its item' using errcode = 'invalid_parameter_value';
    elsif cardinality(p_budget_item) > 0 and not v_reserves
          and not exists (select generate_series(1, cardinality(p_id)) except select unnest(p_budget_item)) then
        select array_agg(q.item order by q.item, q.no), array_agg(q.no order by q.item, q.no),
               array_agg(distinct q.budget order by q.budget), bool_or(q.missing)
        into items, numbers, ids, missing
        from (select u.item, u.budget, dense_rank() over (order by u.budget)::integer as no, d.id is null as missing
              from (select distinct x.item, x.budget from unnest(p_budget_item, p_budget) as x (item, budget)) u
              left join flowfabric.budget d on d.id = u.budget) q;
    else
        select array_agg(q.item order by q.item, q.no), array_agg(q.no order by q.item, q.no),
               array_agg(distinct q.budget order by q.budget), bool_or(q.missing)
        into items, numbers, ids, missing
        from (select u.item, u.budget, dense_rank() over (order by u.budget)::integer as no, d.id is null as missing
              from (select x.item, x.budget from unnest(p_budget_item, p_budget) as x (item, budget)
                    union
                    select g.ord::integer, l.budget
                    from unnest(p_partition, p_id, p_op) with ordinality as g (partition, id, op, ord)
                    join flowfabric.execution e on e.partition = g.partition and e.id = g.id
                    cross join unnest(flowfabric.budgets_of(e)) as l (budget)
                    where p_fenced and coalesce(g.op, 'report') in ('report', 'reserve') and g.ord <> all (p_budget_item)
                    union
                    select g.ord::integer, s.budget_id
                    from unnest(p_partition, p_id, p_op, p_reservation, p_name, p_n) with ordinality
                         as g (partition, id, op, reservation, name, n, ord)
                    join flowfabric.execution e on e.partition = g.partition and e.id = g.id
                    -- A fence (offset 0), here and below: the plan stays on the key.
                    cross join lateral (select x.* from flowfabric.reservation x
                                        where x.partition = g.partition and x.id = g.id offset 0) s
                    where v_reserves and g.op in ('reserve', 'settle', 'cancel')
                      and (s.reservation_id = g.reservation
                           or g.op = 'reserve' and s.generation = e.generation and s.name = g.name and s.n = g.n)) u
              left join flowfabric.budget d on d.id = u.budget) q;
    end if;
    items := coalesce(items, '{}'); numbers := coalesce(numbers, '{}'); ids := coalesce(ids, '{}');
end;
$$;

-- usage_reservations: the reservations that items settle or cancel, or that were made at their place before; sorted by item
-- and budget, each with its item.
create or replace function flowfabric.usage_reservations(
    p_op text[], p_partition integer[], p_id uuid[], p_name text[], p_n integer[], p_reservation uuid[],
    out rows flowfabric.reservation[], out items integer[])
language plpgsql volatile as $$
begin
    select coalesce(array_agg(s.r order by g.ord, (s.r).budget_id), '{}'),
           coalesce(array_agg(g.ord::integer order by g.ord, (s.r).budget_id), '{}')
    into rows, items
    from unnest(p_partition, p_id, p_op, p_reservation, p_name, p_n) with ordinality
         as g (partition, id, op, reservation, name, n, ord)
    join flowfabric.execution e on e.partition = g.partition and e.id = g.id
    cross join lateral (select x as r from flowfabric.reservation x
                        where x.partition = g.partition and x.id = g.id offset 0) s
    where g.op in ('reserve', 'settle', 'cancel')
      and ((s.r).reservation_id = g.reservation
           or g.op = 'reserve' and (s.r).generation = e.generation and (s.r).name = g.name and (s.r).n = g.n);
end;
$$;
