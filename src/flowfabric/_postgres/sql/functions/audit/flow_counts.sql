-- audit_flow_counts: A flow counts its members and edges.
create or replace function flowfabric.audit_flow_counts(p_low integer, p_high integer) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where x.partition between p_low and p_high
    )
    select 'flow_counts', f.partition, f.flow_id, f.node_count || ' ' || f.edge_count from f
    where f.node_count <> (select count(*) from flowfabric.execution e where e.flow_id = f.flow_id and e.partition = f.partition)
       or f.edge_count <> (select count(*) from flowfabric.edge x where x.partition = f.partition and x.flow_id = f.flow_id)
$$;
