-- audit_cancel_backlog: A flow with a backlog is cancelled, and some of its members still have to be cancelled; for the
-- reason of the flow, unless they were replayed.
create or replace function flowfabric.audit_cancel_backlog(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    select 'cancel_backlog', b.partition, b.flow_id, b.cancellation_policy from flowfabric.cancel_backlog b
    left join flowfabric.flow x on x.partition = b.partition and x.flow_id = b.flow_id
    where (b.partition, b.flow_id) between (p_low, p_from) and (p_high, p_to)
      and (x.state is distinct from 'cancelled' or x.cancellation_policy is distinct from b.cancellation_policy
           or x.cancel_reason is distinct from b.reason and not exists (
                  select from flowfabric.cancel_member m
                  join flowfabric.execution e on e.partition = m.partition and e.id = m.id and e.replays > 0
                  where m.partition = b.partition and m.flow_id = b.flow_id)
           or b.cancellation_policy not in ('cancel_all', 'cancel_pending')
           or not exists (select from flowfabric.cancel_member m where m.partition = b.partition and m.flow_id = b.flow_id))
$$;
