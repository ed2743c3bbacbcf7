-- list_children: what the handlers of executions submitted, in the order of creation; p_deep: and what that submitted
--
-- Takes    p_id: the executions. With p_deep the members of flows follow below their flow, and their children below them.
-- Returns  one row per execution or flow, level by level, at most p_limit. The state of a flow is that of its members now;
--          of one with more than 1,000 members it is that of their last count, without the time of its end.
-- Roles    read, submit, work, operate
create or replace function flowfabric.list_children(p_id uuid[], p_deep boolean, p_limit integer)
returns table (parent uuid, id uuid, is_flow boolean, name text, node text, state text, created_at timestamptz,
               completed_at timestamptz, depth integer, arguments bytea)
language sql stable security definer as $$
    with recursive tree as (
        select null::uuid as parent, u.id, false as is_flow, null::text collate "C" as name, null::text as node, null::text as state,
               null::timestamptz as created_at, null::timestamptz as completed_at, 0 as depth,
               null::bytea as arguments
        from unnest(p_id) as u (id)
        union all
        select t.id, c.id, c.is_flow, c.name, c.node, c.state, c.created_at, c.completed_at, t.depth + 1, c.arguments
        from tree t cross join lateral (
            select * from (
                (select e.id, false as is_flow, r.kind as name, e.node, e.state, e.created_at, e.completed_at,
                        case when e.payload_encoding is null then substring(e.payload for 200) end as arguments
                 from flowfabric.execution e join flowfabric.route r on r.id = e.route
                 where not t.is_flow and e.parent_id = t.id order by e.created_at, e.id limit p_limit)
                union all
                (select f.flow_id, true, f.flow_kind collate "C", null, coalesce(n.state, s.state, f.state), f.created_at,
                        n.ended_at, null
                 from flowfabric.flow f
                 left join flowfabric.flow_summary s on s.partition = f.partition and s.flow_id = f.flow_id
                 left join lateral (
                     select m.state, case when m.state in ('completed', 'failed', 'cancelled') then
                                (select max(e.completed_at) from flowfabric.execution e where e.flow_id = m.flow_id) end as ended_at
                     from flowfabric.count_members(case when f.node_count <= 1000 then f end) m) n on true
                 where not t.is_flow and f.parent_id = t.id order by f.created_at, f.flow_id limit p_limit)
                union all
                (select e.id, false, r.kind, e.node, e.state, e.created_at, e.completed_at,
                        case when e.payload_encoding is null then substring(e.payload for 200) end as arguments
                 from flowfabric.execution e join flowfabric.route r on r.id = e.route
                 where t.is_flow and e.flow_id = t.id order by e.created_at, e.id limit p_limit)) k
            order by k.created_at, k.id) c
        where p_deep or t.depth = 0
    )
    select t.parent, t.id, t.is_flow, t.name, t.node, t.state, t.created_at, t.completed_at, t.depth, t.arguments
    from tree t where t.depth > 0 limit p_limit
$$;
