-- delete_flow: delete a flow and its members, if all of them have ended
--
-- Locks    the flow, then its groups and its members, by id.
-- Returns  ok, flow_not_found, flow_not_terminal, busy, or flow_needed and the execution that needs its results.
-- Roles    operate
create or replace function flowfabric.delete_flow(p_partition integer, p_flow uuid) returns text
language plpgsql security definer as $$
declare
    v_parent text;
begin
    perform flowfabric.require_read_committed();
    perform 1 from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow for update;
    if not found then
        return 'flow_not_found';
    end if;
    perform 1 from flowfabric.edge_group g where g.partition = p_partition and g.flow_id = p_flow order by g.downstream for update;
    perform 1 from flowfabric.execution e where e.flow_id = p_flow order by e.id for update;
    select flowfabric.kept_for(f.parent_id, flowfabric.flow_result_step(f.flow_id)) into v_parent from flowfabric.flow f
    where f.partition = p_partition and f.flow_id = p_flow;
    if v_parent is not null then
        return 'flow_needed ' || v_parent;
    end if;
    return flowfabric.forget_flow(p_partition, p_flow);
end;
$$;
