-- audit_cancel_forgotten: Every live member of a cancelled flow is marked to be cancelled.
create or replace function flowfabric.audit_cancel_forgotten(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with f as (
        select x.* from flowfabric.flow x where (x.partition, x.flow_id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'cancel_forgotten', e.partition, e.id, e.state from f
    join flowfabric.execution e on e.flow_id = f.flow_id and e.partition = f.partition and e.completed_at is null
    where ((f.cancellation_policy = 'cancel_all' and e.replays = 0) or e.blocking_reason = 'paused_by_flow_cancel')
      and not exists (select from flowfabric.cancel_member m where m.partition = e.partition and m.id = e.id offset 0)
$$;
