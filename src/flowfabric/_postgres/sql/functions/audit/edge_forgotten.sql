-- audit_edge_forgotten: Every end of an upstream is counted on its edges, or a pending row will count it.
create or replace function flowfabric.audit_edge_forgotten(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with d as (
        select x.* from flowfabric.edge x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    ), owed as (
        select x.* from flowfabric.pending_cascade x where x.partition between p_low and p_high
    )
    select 'edge_forgotten', d.partition, d.edge_id, up.state from d
    join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream
    where d.applied_at is not null and d.outcome is null
      and d.from_run < up.replays + case when up.completed_at is null then 0 else 1 end
      and not exists (select from owed o where o.partition = d.partition and o.id = d.upstream and o.run >= d.from_run
                      and (o.after is null or o.after <= d.downstream))
$$;
