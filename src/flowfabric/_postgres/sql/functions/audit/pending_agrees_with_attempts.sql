-- audit_pending_agrees_with_attempts: Only an execution without attempts waits for its first; only one with attempts is retried or continued.
create or replace function flowfabric.audit_pending_agrees_with_attempts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'pending_agrees_with_attempts', e.partition, e.id, e.pending || ' ' || e.attempts from e
    where (e.pending = 'first' and e.attempts > 0) or (e.pending in ('retry', 'interrupted') and e.attempts = 0)
$$;
