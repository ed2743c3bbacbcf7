-- audit_timers: Every future time has a timer that is not later. The rules are named timer_lease, timer_attempt and so
-- on.
create or replace function flowfabric.audit_timers(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with pointed as materialized (
        select t.kind, u.partition, u.id, min(t.due_at) as due_at
        from flowfabric.timer t cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
        where u.partition between p_low and p_high
        group by t.kind, u.partition, u.id
    )
    select 'timer_' || o.kind, o.partition, o.id, o.own_at::text
    from (select k.kind, e.partition, e.id, flowfabric.own_time(k.kind, e, d) as own_at
          from flowfabric.execution e, flowfabric.deployment d,
               (values ('lease'), ('attempt'), ('deadline'), ('delay'), ('suspension'), ('retention')) as k (kind)
          where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to)) o
    left join pointed p on p.kind = o.kind and p.partition = o.partition and p.id = o.id
    -- A shortened retention applies to executions that end from then on.
    where o.own_at is not null and (p.due_at is null or (p.due_at > o.own_at and p.due_at > flowfabric.now() and o.kind <> 'retention'))
$$;
