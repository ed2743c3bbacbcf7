-- purge_flows: delete flows whose members are deleted.
create or replace function flowfabric.purge_flows(p_partition integer[], p_flow uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.edge d using unnest(p_partition, p_flow) as u (partition, flow)
    where d.partition = u.partition and d.flow_id = u.flow;
    delete from flowfabric.edge_group g using unnest(p_partition, p_flow) as u (partition, flow)
    where g.partition = u.partition and g.flow_id = u.flow;
    delete from flowfabric.sibling_cancel s using unnest(p_partition, p_flow) as u (partition, flow)
    where s.partition = u.partition and s.flow_id = u.flow;
    -- The backlog first, as acknowledging members does.
    delete from flowfabric.cancel_backlog c using unnest(p_partition, p_flow) as u (partition, flow)
    where c.partition = u.partition and c.flow_id = u.flow;
    delete from flowfabric.cancel_member c using unnest(p_partition, p_flow) as u (partition, flow)
    where c.partition = u.partition and c.flow_id = u.flow;
    delete from flowfabric.flow_summary s using unnest(p_partition, p_flow) as u (partition, flow)
    where s.partition = u.partition and s.flow_id = u.flow;
    if exists (select from flowfabric.budget) then
        perform flowfabric.drop_owned(p_flow);
    end if;
    delete from flowfabric.flow f using unnest(p_partition, p_flow) as u (partition, flow)
    where f.partition = u.partition and f.flow_id = u.flow;
end;
$$;
