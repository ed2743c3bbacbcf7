-- read_edges: the edges of a flow, of one side of a member, or one of them, by id.
--
-- Takes    p_after: continue after this edge. p_limit: null means all.
-- Roles    read, submit, work, operate
create or replace function flowfabric.read_edges(
    p_partition integer, p_flow uuid, p_upstream uuid, p_downstream uuid, p_edge uuid, p_after uuid, p_limit integer)
returns setof flowfabric.edge
language plpgsql stable security definer as $$
declare
    v_from uuid := coalesce(p_after, flowfabric.zero_uuid());
begin
    if p_edge is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.flow_id = p_flow and d.edge_id = p_edge;
    elsif p_upstream is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.upstream = p_upstream and d.flow_id = p_flow
          and d.edge_id >= v_from and d.edge_id is distinct from p_after
        order by d.edge_id limit p_limit;
    elsif p_downstream is not null then
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.downstream = p_downstream and d.flow_id is not distinct from p_flow
          and d.edge_id >= v_from and d.edge_id is distinct from p_after
        order by d.edge_id limit p_limit;
    else
        return query select d.* from flowfabric.edge d
        where d.partition = p_partition and d.flow_id = p_flow
          and d.edge_id >= v_from and d.edge_id is distinct from p_after
        order by d.edge_id limit p_limit;
    end if;
end;
$$;
