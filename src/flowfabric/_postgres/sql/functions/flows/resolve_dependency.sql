-- resolve_dependency: resolve one edge as if its upstream had this outcome
--
-- Locks    the group, then the downstream.
-- Returns  satisfied, impossible, already_resolved, edge_not_found, not_applied.
-- Roles    operate
create or replace function flowfabric.resolve_dependency(
    p_partition integer, p_flow uuid, p_edge uuid, p_upstream uuid, p_downstream uuid, p_outcome text) returns text
language plpgsql security definer as $$
declare
    d flowfabric.edge;
begin
    perform flowfabric.require_read_committed();
    perform flowfabric.lock_group(p_partition, p_flow, p_downstream);
    select x.* into d from flowfabric.edge x
    where x.partition = p_partition and x.flow_id = p_flow and x.edge_id = p_edge;
    if d.edge_id is null or d.upstream <> p_upstream or d.downstream <> p_downstream then
        return 'edge_not_found';
    elsif d.applied_at is null then
        return 'not_applied';
    elsif d.outcome is not null then
        return 'already_resolved';
    end if;
    perform flowfabric.resolve_edges(
        array[p_partition], array[p_flow], array[p_edge], array[p_downstream], array[p_outcome], array[null::bigint],
        flowfabric.now());
    return case p_outcome when 'success' then 'satisfied' else 'impossible' end;
end;
$$;
