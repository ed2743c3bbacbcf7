-- audit_edge_ends: An edge joins two different members of its flow.
create or replace function flowfabric.audit_edge_ends(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with d as (
        select x.* from flowfabric.edge x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'edge_ends', d.partition, d.edge_id, null from d
    left join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream
    left join flowfabric.execution down on down.partition = d.partition and down.id = d.downstream
    where d.upstream = d.downstream or (up.flow_id = d.flow_id and down.flow_id = d.flow_id) is not true
$$;
