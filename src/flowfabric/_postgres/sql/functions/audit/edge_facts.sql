-- audit_edge_facts: The stored facts of an edge agree: it is resolved at most once, and only after it was applied.
create or replace function flowfabric.audit_edge_facts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with d as (
        select x.* from flowfabric.edge x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'edge_facts', d.partition, d.edge_id, concat_ws(' ', d.outcome, d.applied_at, d.resolved_at) from d
    where d.outcome not in ('success', 'failed', 'cancelled', 'expired', 'skipped') or d.data_passing_ref = ''
       or (d.outcome is null) <> (d.resolved_at is null) or (d.outcome is null and d.resolved_event is not null)
       or d.applied_at < d.created_at or d.resolved_at < d.applied_at or (d.applied_at is null and d.outcome is not null)
$$;
