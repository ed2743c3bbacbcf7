-- audit_times_finite: The times of an execution can be read: none is infinite or outside the years 1 to 9999.
create or replace function flowfabric.audit_times_finite(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'times_finite', e.partition, e.id, t.name
    from e cross join lateral (values
        ('delay_until', e.delay_until), ('deadline_at', e.deadline_at), ('attempt_timeout_at', e.attempt_timeout_at),
        ('suspension_timeout_at', e.suspension_timeout_at), ('retry_at', e.retry_at),
        ('lease_expires_at', e.lease_expires_at)) as t (name, at)
    where t.at <= '0001-01-01 UTC' or t.at >= '9999-12-31 23:59:59.999999 UTC'
$$;
