-- forget_flow: like delete_flow, without waiting: busy if another transaction has locked the flow, a group or a member.
create or replace function flowfabric.forget_flow(p_partition integer, p_flow uuid) returns text
language plpgsql as $$
declare
    v_ids uuid[];
    v_live boolean;
    v_groups integer;
begin
    perform 1 from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow for update skip locked;
    if not found then
        return 'busy';
    end if;
    with held as materialized (
        select from flowfabric.edge_group g where g.partition = p_partition and g.flow_id = p_flow for update skip locked)
    select count(*) into v_groups from held h;
    if v_groups < (select count(*) from flowfabric.edge_group g where g.partition = p_partition and g.flow_id = p_flow) then
        return 'busy';
    end if;
    with held as materialized (
        select e.id, e.completed_at is null as live from flowfabric.execution e where e.flow_id = p_flow
        order by e.id for update skip locked)
    select array_agg(h.id), coalesce(bool_or(h.live), false) into v_ids, v_live from held h;
    if v_live or exists (select from flowfabric.pending_cascade p where p.partition = p_partition and p.flow_id = p_flow) then
        return 'flow_not_terminal';
    elsif coalesce(cardinality(v_ids), 0) < (select count(*) from flowfabric.execution e where e.flow_id = p_flow) then
        return 'busy';
    end if;
    if v_ids is not null then
        perform flowfabric.purge_rows(array_fill(p_partition, array[cardinality(v_ids)]), v_ids);
    end if;
    perform flowfabric.purge_flows(array[p_partition], array[p_flow]);
    return 'ok';
end;
$$;
