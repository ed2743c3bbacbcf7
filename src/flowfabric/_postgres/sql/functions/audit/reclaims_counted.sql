-- audit_reclaims_counted: The counter of reclaims counts the attempts that were reclaims.
create or replace function flowfabric.audit_reclaims_counted(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'reclaims_counted', e.partition, e.id, e.reclaims::text from e
    where e.reclaims <> (select count(*) from flowfabric.attempts_of(e.partition, e.id) a where a.attempt_type = 'reclaim')
$$;
