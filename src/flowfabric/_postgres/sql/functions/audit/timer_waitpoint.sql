-- audit_timer_waitpoint: Every pending waitpoint that expires has a timer that is not later.
create or replace function flowfabric.audit_timer_waitpoint(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with pointed as materialized (
        select t.kind, u.partition, u.id, min(t.due_at) as due_at
        from flowfabric.timer t cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
        where t.kind = 'waitpoint' and u.partition between p_low and p_high
        group by t.kind, u.partition, u.id
    )
    select 'timer_waitpoint', w.partition, w.id, w.expires_at::text from flowfabric.waitpoint w
    left join pointed p on p.kind = 'waitpoint' and p.partition = w.partition and p.id = w.id
    where (w.partition, w.id) between (p_low, p_from) and (p_high, p_to) and w.state = 'pending'
      and w.expires_at < flowfabric.far_date() and (p.due_at is null or p.due_at > w.expires_at)
$$;
