-- audit_cancel_owed: A member marked to be cancelled is held back, and its flow is being cancelled.
create or replace function flowfabric.audit_cancel_owed(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with c as (
        select x.* from flowfabric.cancel_member x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'cancel_owed', c.partition, c.id, concat_ws(' ', e.state, e.blocking_reason) from c
    left join flowfabric.execution e on e.partition = c.partition and e.id = c.id and e.flow_id = c.flow_id
    where e.id is null
       or not exists (select from flowfabric.cancel_backlog b where b.partition = c.partition and b.flow_id = c.flow_id)
       or (e.completed_at is null and e.state not in ('active', 'suspended')
           and e.blocking_reason is distinct from 'paused_by_flow_cancel')
$$;
