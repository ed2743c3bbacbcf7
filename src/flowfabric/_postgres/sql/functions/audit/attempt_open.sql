-- audit_attempt_open: At most the latest attempt is open, and it is open exactly when the state says so.
create or replace function flowfabric.audit_attempt_open(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'attempt_open', e.partition, e.id, concat_ws(' ', e.state, e.disposition) from e
    where e.attempts > 0
      and case when e.state = 'active' or e.pending = 'interrupted' then e.disposition is not null
               else coalesce(e.disposition, '') not in (
                   'completed', 'terminal_failed', 'retry_scheduled', 'expired', 'cancelled', 'skipped') end
$$;
