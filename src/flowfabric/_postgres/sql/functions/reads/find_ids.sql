-- find_ids: executions and flows whose ids end or begin with some hex digits
--
-- Takes    the digits, the partition they name if they are an end, and the lowest and the highest id they begin; the
--          whole id is looked up in its partition. p_flows: only flows, or only executions.
-- Returns  at most p_limit, newest first; the state of a flow is the one it was given, and the one last counted.
-- Roles    read, operate
create or replace function flowfabric.find_ids(
    p_digits text, p_partition integer, p_low uuid, p_high uuid, p_flows boolean, p_limit integer)
returns table (id uuid, is_flow boolean, kind text, state text, summary text, created_at timestamptz)
language sql stable security definer as $$
    with found as materialized (
        select n.partition, n.id, n.is_flow from flowfabric.find_by_end(p_partition, p_digits, p_limit) n where p_low <> p_high
        union
        select n.partition, n.id, n.is_flow
        from flowfabric.deployment d
        cross join lateral flowfabric.find_by_beginning(
            case when p_low = p_high then p_partition else 0 end,
            case when p_low = p_high then p_partition else d.flow_partitions - 1 end, p_low, p_high, p_limit) n
    ), seen as (
        select n.id, false as is_flow, r.kind, e.state, null::text as summary, e.created_at
        from found n
        join flowfabric.execution e on e.partition = n.partition and e.id = n.id
        join flowfabric.route r on r.id = e.route
        where not n.is_flow and p_flows is distinct from true
        union all
        select n.id, true, f.flow_kind, f.state, s.state, f.created_at
        from found n
        join flowfabric.flow f on f.partition = n.partition and f.flow_id = n.id
        left join flowfabric.flow_summary s on s.partition = n.partition and s.flow_id = n.id
        where n.is_flow and p_flows is distinct from false
    )
    select s.id, s.is_flow, s.kind, s.state, s.summary, s.created_at
    from seen s order by s.created_at desc, s.id desc limit p_limit
$$;
