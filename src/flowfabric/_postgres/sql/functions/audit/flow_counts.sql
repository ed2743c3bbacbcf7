-- audit_flow_counts: A flow counts its members and edges.
create or replace function flowfabric.audit_flow_counts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'flow_counts', f.partition, f.flow_id, f.node_count || ' ' || f.edge_count from f
    where f.node_count <> (select count(*) from flowfabric.execution e where e.flow_id = f.flow_id and e.partition = f.partition)
       or f.edge_count <> (select count(*) from flowfabric.edge x where x.partition = f.partition and x.flow_id = f.flow_id)
$$;
