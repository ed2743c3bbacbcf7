-- read_edges: the edges of a flow, of one side of a member, or one of them, by id.
--
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_edges(
    p_partition integer, p_flow uuid, p_upstream uuid, p_downstream uuid, p_edge uuid)
returns setof flowfabric.edge
language plpgsql stable security definer as $$
begin
    if p_edge is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.flow_id = p_flow and d.edge_id = p_edge;
    elsif p_upstream is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.upstream = p_upstream and d.flow_id = p_flow order by d.edge_id;
    elsif p_downstream is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.downstream = p_downstream and d.flow_id = p_flow order by d.edge_id;
    else
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.flow_id = p_flow order by d.edge_id;
    end if;
end;
$$;
