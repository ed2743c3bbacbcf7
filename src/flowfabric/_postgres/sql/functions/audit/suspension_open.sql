-- audit_suspension_open: An execution has an open suspension exactly while it is suspended.
create or replace function flowfabric.audit_suspension_open(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'suspension_open', e.partition, e.id, e.state from e
    where (e.state = 'suspended') <> exists (
        select from flowfabric.suspension s where s.partition = e.partition and s.id = e.id and s.closed_at is null)
$$;
