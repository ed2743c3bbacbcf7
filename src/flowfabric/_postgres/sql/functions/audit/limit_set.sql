-- audit_limit_set: An execution with limits has a limited route, and its limit set is stored; others have neither.
create or replace function flowfabric.audit_limit_set(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'limit_set', e.partition, e.id, concat_ws(' ', r.id, e.limits)
    from e join flowfabric.route r on r.id = e.route
    where r.limited <> (e.limits is not null)
       or (e.limits is not null and not exists (select from flowfabric.limit_set l where l.digest = e.limits))
$$;
