-- audit_waits_for_nothing: An execution that is parked for others has a waiter row for one that has not ended, or a
-- timer that wakes it.
create or replace function flowfabric.audit_waits_for_nothing(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with pointed as materialized (
        select t.kind, u.partition, u.id, min(t.due_at) as due_at
        from flowfabric.timer t cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
        where t.kind = 'parked' and u.partition between p_low and p_high
        group by t.kind, u.partition, u.id
    )
    select 'waits_for_nothing', e.partition, e.id, e.blocking_detail from flowfabric.execution e
    where (e.partition, e.id) between (p_low, p_from) and (p_high, p_to) and e.is_parked and e.state = 'waiting_children'
      and not exists (select from flowfabric.waiter w join flowfabric.execution c on c.partition = w.awaited_partition
                      and c.id = w.awaited_id and c.completed_at is null
                      where w.partition = e.partition and w.id = e.id)
      and not exists (select from pointed p where p.kind = 'parked' and p.partition = e.partition and p.id = e.id)
$$;
