-- audit_edge_without_group: Every applied edge has a group.
create or replace function flowfabric.audit_edge_without_group(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with d as (
        select x.* from flowfabric.edge x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'edge_without_group', d.partition, d.edge_id, d.downstream::text from d
    where d.applied_at is not null and not exists (
        select from flowfabric.edge_group x where x.partition = d.partition and x.flow_id = d.flow_id and x.downstream = d.downstream)
$$;
