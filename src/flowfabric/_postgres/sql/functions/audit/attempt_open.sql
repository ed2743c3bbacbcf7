-- audit_attempt_open: At most the latest attempt is open, and it is open exactly when the state says so.
create or replace function flowfabric.audit_attempt_open(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'attempt_open', e.partition, e.id, e.state || ' ' || e.attempt_lifecycle from e
    where e.attempts > 0 and e.attempt_lifecycle <> all (case
        when e.state = 'active' then array['started']
        when e.pending = 'interrupted' then array['suspended']
        else array['ended_success', 'ended_failure', 'ended_cancelled'] end)
$$;
