-- lock_group: lock a group and then its downstream, waiting for both; false for an unknown group.
create or replace function flowfabric.lock_group(p_partition integer, p_flow uuid, p_downstream uuid) returns boolean
language plpgsql as $$
declare
    v_found boolean;
begin
    perform 1 from flowfabric.edge_group g
    where g.partition = p_partition and g.flow_id = p_flow and g.downstream = p_downstream for update;
    v_found := found;
    perform 1 from flowfabric.execution e where e.partition = p_partition and e.id = p_downstream for no key update;
    return v_found;
end;
$$;
