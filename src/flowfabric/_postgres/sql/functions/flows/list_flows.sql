-- list_flows: the flows of a partition by id, or of all partitions by time, newest first
--
-- Takes    p_partition and p_after: after this id. Else p_before and p_before_id: older than this.
-- Roles    read, operate
create or replace function flowfabric.list_flows(
    p_partition integer, p_after uuid, p_before timestamptz, p_before_id uuid, p_namespace text, p_kind text, p_limit integer)
returns table (partition integer, flow_id uuid, created_at timestamptz, state text, summary text, flow_kind text,
               namespace text, node_count integer)
language plpgsql stable security definer as $$
begin
    if p_partition is not null then
        return query
        select f.partition, f.flow_id, f.created_at, f.state, s.state, f.flow_kind, f.namespace, f.node_count
        from flowfabric.flow f
        left join lateral (select x.state from flowfabric.flow_summary x
                           where x.partition = f.partition and x.flow_id = f.flow_id offset 0) s on true
        where f.partition = p_partition and (p_after is null or f.flow_id > p_after)
        order by f.flow_id limit p_limit;
    else
        return query
        select f.partition, f.flow_id, f.created_at, f.state, s.state, f.flow_kind, f.namespace, f.node_count
        from flowfabric.flow f
        left join lateral (select x.state from flowfabric.flow_summary x
                           where x.partition = f.partition and x.flow_id = f.flow_id offset 0) s on true
        where (p_before is null or (f.created_at, f.flow_id) < (p_before, p_before_id))
          and (p_namespace is null or f.namespace = p_namespace) and (p_kind is null or f.flow_kind = p_kind)
        order by f.created_at desc, f.flow_id desc limit p_limit;
    end if;
end;
$$;
