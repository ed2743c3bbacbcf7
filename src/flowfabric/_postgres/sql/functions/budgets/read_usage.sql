-- read_usage: what an execution, or the members of a flow, used and hold of budgets; with p_children also what they submitted,
-- and what that did: tasks and members of flows, at most p_limit
--
-- p_most   at most this many pairs of execution and budget, by their ids, after the pair of p_after_id and p_after_budget
--          (null: from the first); null: all, with what was asked for first.
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_usage(
    p_partition integer, p_id uuid, p_children boolean, p_limit integer, p_after_id uuid, p_after_budget uuid, p_most integer)
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
        select t.partition, t.id, t.parent_id
        from (select tree.partition, tree.id, tree.parent_id from tree limit p_limit + 1) t
        where p_after_id is null or t.id >= p_after_id
    ), added as (
        select q.id, q.parent_id, q.budget_id, coalesce(b.name, q.budget_id::text) as name, q.dimension,
               least(sum(q.used), 9223372036854775807)::bigint as used,
               least(sum(q.held), 9223372036854775807)::bigint as held
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
    )
    select p.id, p.parent_id, p.budget_id, p.name, p.dimension, p.used, p.held
    from (select a.*, dense_rank() over (order by a.id, a.budget_id) as place from added a
          where p_after_id is null or (a.id, a.budget_id) > (p_after_id, p_after_budget)) p
    where p_most is null or p.place <= p_most
    order by case when p_most is null then p.parent_id end nulls first, p.id, case when p_most is null then p.name end,
             p.budget_id, p.dimension
$$;
