-- audit_retries_counted: The counter of retries counts the attempts that ended with a retry.
create or replace function flowfabric.audit_retries_counted(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'retries_counted', e.partition, e.id, e.retries::text from e
    where e.retries <> (select count(*) from flowfabric.attempts_of(e.partition, e.id) a
                        where a.disposition = 'retry_scheduled')
$$;
