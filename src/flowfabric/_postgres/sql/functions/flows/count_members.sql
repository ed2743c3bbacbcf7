-- count_members: the summary of a flow as its members are now; no row if it has none.
create or replace function flowfabric.count_members(f flowfabric.flow) returns setof flowfabric.flow_summary
language sql volatile as $$
    select f.partition, f.flow_id,
           case when c.live = 0 and f.state = 'cancelled' then 'cancelled'
                when c.live = 0 and (c.failed > 0 or c.expired > 0 or c.stopped > 0) then 'failed'
                when c.live = 0 then 'completed'
                when c.active > 0 then 'running'
                when c.suspended + c.delayed + c.rate_limited + c.waiting_children > 0 then 'blocked'
                else 'open' end,
           c.completed, c.failed, c.cancelled, c.expired, c.skipped, c.active, c.suspended, c.waiting, c.delayed,
           c.rate_limited, c.waiting_children, flowfabric.now()
    from (
        select count(*) as total, count(*) filter (where e.completed_at is null) as live,
               count(*) filter (where e.state = 'completed')::integer as completed,
               count(*) filter (where e.state = 'failed')::integer as failed,
               count(*) filter (where e.state = 'cancelled')::integer as cancelled,
               count(*) filter (where e.state = 'cancelled' and coalesce(e.cancellation_reason, '') not in
                   ('sibling_quorum_satisfied', 'sibling_quorum_impossible')) as stopped,
               count(*) filter (where e.state = 'expired')::integer as expired,
               count(*) filter (where e.state = 'skipped')::integer as skipped,
               count(*) filter (where e.state = 'active')::integer as active,
               count(*) filter (where e.state = 'suspended')::integer as suspended,
               count(*) filter (where e.state in ('waiting', 'resumable'))::integer as waiting,
               count(*) filter (where e.state = 'delayed')::integer as delayed,
               count(*) filter (where e.state = 'rate_limited')::integer as rate_limited,
               count(*) filter (where e.state = 'waiting_children')::integer as waiting_children
        from flowfabric.execution e where e.flow_id = f.flow_id) c
    where c.total > 0
$$;
