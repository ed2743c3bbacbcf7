-- audit_edge_ahead: An edge does not wait for a run of its upstream that cannot come next.
create or replace function flowfabric.audit_edge_ahead(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with d as (
        select x.* from flowfabric.edge x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'edge_ahead', d.partition, d.edge_id, d.from_run::text from d
    join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream
    where d.from_run > up.replays + case when up.completed_at is null then 0 else 1 end
$$;
