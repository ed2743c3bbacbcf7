-- read_usage: what an execution, or the members of a flow, used and hold of budgets; with p_children also what they submitted,
-- and what that did: tasks and members of flows, at most p_limit
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_usage(p_partition integer, p_id uuid, p_children boolean, p_limit integer)
returns table (id uuid, parent_id uuid, budget_id uuid, name text, dimension text, used bigint, held bigint)
language sql stable security definer as $$
    with recursive tree as (
        (select e.partition, e.id, null::uuid as parent_id from flowfabric.execution e
         where e.partition = p_partition and e.id = p_id
         union all
         (select e.partition, e.id, null::uuid from flowfabric.execution e
          where e.flow_id = p_id order by e.created_at, e.id limit p_limit))
        union all
        select c.partition, c.id, t.id
        from tree t cross join lateral (
            (select e.partition, e.id from flowfabric.execution e
             where e.parent_id = t.id order by e.created_at, e.id limit p_limit)
            union all
            (select e.partition, e.id from flowfabric.flow f join flowfabric.execution e on e.flow_id = f.flow_id
             where f.parent_id = t.id order by e.created_at, e.id limit p_limit)) c
        where p_children
    ), asked as materialized (
        select t.partition, t.id, t.parent_id from tree t limit p_limit + 1
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
