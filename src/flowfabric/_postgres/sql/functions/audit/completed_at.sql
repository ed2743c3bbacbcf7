-- audit_completed_at: An execution has an end exactly when its state is final.
create or replace function flowfabric.audit_completed_at(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'completed_at', e.partition, e.id, e.state from e
    where (e.completed_at is not null) <> (e.state in ('completed', 'failed', 'cancelled', 'expired', 'skipped'))
$$;
