-- list_held: the executions that a limit holds, in the order in which it releases them
--
-- Takes    p_key: only of this value of the policy's key; null: of all. p_rank, p_created, p_held: after this position within
--          a key, p_after the key. The others are filters as those of find; null: all.
-- Roles    read, operate
create or replace function flowfabric.list_held(
    p_limit uuid, p_key text, p_after text, p_rank integer, p_created timestamptz, p_held uuid, p_size integer,
    p_namespace text, p_lanes text[], p_kinds text[], p_tag_key text, p_tag_value text, p_flow uuid, p_parent uuid,
    p_from timestamptz, p_to timestamptz)
returns table (id uuid, kind text, lane text, namespace text, limit_id uuid, limit_key text, rank integer,
               created_at timestamptz, blocked_at timestamptz, retry_at timestamptz, needs jsonb, detail text)
language sql stable security definer as $$
    select b.id, r.kind, r.lane, e.namespace, b.limit_id, b.limit_key, b.rank, b.created_at, b.blocked_at, b.retry_at, flowfabric.all_needs(b.needs, b.limit_id),
           e.blocking_detail
    from flowfabric.blocked b
    -- Each by its key: with a filter the planner might begin with a flow, or the children of a parent.
    cross join lateral (select x.* from flowfabric.execution x where x.partition = b.partition and x.id = b.id offset 0) e
    cross join lateral (select x.kind, x.lane from flowfabric.route x where x.id = e.route offset 0) r
    where b.limit_id = p_limit and (p_key is null or b.limit_key = p_key collate "C")
      and (p_after is null
           or (b.limit_key, b.rank, b.created_at, b.id) > (p_after collate "C", p_rank, p_created, p_held))
      and (p_from is null or b.created_at >= p_from) and (p_to is null or b.created_at < p_to)
      and (p_namespace is null or e.namespace = p_namespace)
      and (p_lanes is null or r.lane = any (p_lanes)) and (p_kinds is null or r.kind = any (p_kinds))
      and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))
      and (p_flow is null or e.flow_id = p_flow) and (p_parent is null or e.parent_id = p_parent)
    order by b.limit_key, b.rank, b.created_at, b.id limit p_size
$$;
