-- audit_worker_known: The number of a worker in an execution has a name.
create or replace function flowfabric.audit_worker_known(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'worker_known', e.partition, e.id, e.worker::text from e
    where e.worker is not null and not exists (select from flowfabric.worker w where w.id = e.worker)
$$;
