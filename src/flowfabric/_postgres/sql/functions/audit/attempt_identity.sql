-- audit_attempt_identity: The attempts of an execution have different ids, leases and epochs.
create or replace function flowfabric.audit_attempt_identity(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'attempt_identity', e.partition, e.id, null from e
    where exists (select from flowfabric.attempts_of(e.partition, e.id) a
                  group by () having count(*) <> count(distinct a.attempt_id)
                                  or count(*) <> count(distinct a.lease_id)
                                  or count(*) <> count(distinct a.lease_epoch))
$$;
