-- read_usage: what an execution, and its children if asked for, used and hold of budgets
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_usage(p_partition integer, p_id uuid, p_children boolean, p_limit integer)
returns table (id uuid, parent_id uuid, budget_id uuid, name text, dimension text, used bigint, held bigint)
language sql stable security definer as $$
    with asked as materialized (
        select e.partition, e.id, null::uuid as parent_id from flowfabric.execution e
        where e.partition = p_partition and e.id = p_id
        union all
        (select c.partition, c.id, c.parent_id from flowfabric.execution c
         where p_children and c.parent_id = p_id order by c.created_at, c.id limit p_limit)
    )
    select q.id, q.parent_id, q.budget_id, coalesce(b.name, q.budget_id::text), q.dimension,
           least(sum(q.used), 9223372036854775807)::bigint, least(sum(q.held), 9223372036854775807)::bigint
    from (select a.id, a.parent_id, u.budget_id, u.dimension, u.amount as used, 0 as held
          from asked a cross join lateral (select x.* from flowfabric.budget_usage x
                                           where x.partition = a.partition and x.id = a.id offset 0) u
          union all
          select a.id, a.parent_id, s.budget_id, s.dimension, s.amount, 0
          from asked a cross join lateral (select x.* from flowfabric.budget_spend x
                                           where x.execution_id = a.id offset 0) s
          union all
          select a.id, a.parent_id, r.budget_id, d.dim, 0, d.amount
          from asked a cross join lateral (select x.* from flowfabric.reservation x
                                           where x.partition = a.partition and x.id = a.id offset 0) r
          cross join unnest(r.dimensions, r.amounts) as d (dim, amount) where r.state = 'held') q
    left join flowfabric.budget b on b.id = q.budget_id
    group by q.id, q.parent_id, q.budget_id, b.name, q.dimension
    order by q.parent_id nulls first, q.id, 4, q.dimension
$$;
