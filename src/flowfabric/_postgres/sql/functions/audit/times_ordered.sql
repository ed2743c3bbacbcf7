-- audit_times_ordered: An execution is created before its latest transition, which is not after its latest change.
create or replace function flowfabric.audit_times_ordered(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'times_ordered', e.partition, e.id, null from e
    where e.transitioned_at > e.mutated_at or e.created_at > e.transitioned_at
$$;
