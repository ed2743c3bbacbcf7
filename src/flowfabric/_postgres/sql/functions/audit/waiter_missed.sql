-- audit_waiter_missed: A parked execution waits for something that has not happened yet, or a timer wakes it.
create or replace function flowfabric.audit_waiter_missed(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with pointed as materialized (
        select t.kind, u.partition, u.id, min(t.due_at) as due_at
        from flowfabric.timer t cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
        where t.kind = 'parked' and u.partition between p_low and p_high
        group by t.kind, u.partition, u.id
    )
    select 'waiter_missed', w.partition, w.id, null from flowfabric.waiter w
    join flowfabric.execution x on x.partition = w.partition and x.id = w.id
    left join flowfabric.execution c on c.partition = w.awaited_partition and c.id = w.awaited_id
    where w.partition between p_low and p_high and x.is_parked
      and (c.id is null or c.completed_at is not null)
      and not exists (select from flowfabric.waitpoint p where p.partition = w.awaited_partition
                      and p.waitpoint_id = w.awaited_id and p.state = 'pending')
      and not exists (select from pointed p where p.kind = 'parked' and p.partition = w.partition and p.id = w.id)
$$;
