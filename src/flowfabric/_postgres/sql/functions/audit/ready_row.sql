-- audit_ready_row: A ready row exists exactly for the executions that may be claimed, in its position.
create or replace function flowfabric.audit_ready_row(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'ready_row', e.partition, e.id, e.state || ' has ' || (select count(*) from flowfabric.ready r where r.id = e.id)
    from e where (select count(*) from flowfabric.ready r
                  where r.partition = e.partition and r.id = e.id and r.route = flowfabric.ready_route(e)
                    and r.rank = flowfabric.rank_of(e.priority) and r.created_at = e.created_at
                    and r.deadline_at is not distinct from e.deadline_at and r.limits is not distinct from e.limits
                    and r.namespace is not distinct from nullif(e.namespace, '')
                    and (r.available_at is not null) = (e.state = 'active'))
        <> case when (e.state in ('waiting', 'resumable')
                      and e.blocking_reason in ('waiting_for_worker', 'waiting_for_capable_worker'))
                  or (e.state = 'active' and e.lease_lost is not null   -- marked to be cancelled, it may not be claimed
                      and not exists (select from flowfabric.cancel_member c where c.partition = e.partition and c.id = e.id))
                then 1 else 0 end
$$;
