-- is_uncovered: whether readers see that an execution, which waits for a worker, waits for a capable one.
create or replace function flowfabric.is_uncovered(e flowfabric.execution, p_now timestamptz) returns boolean
language sql stable as $$
    select e.state in ('waiting', 'resumable') and e.blocking_reason = 'waiting_for_worker'
       and exists (select from flowfabric.uncovered u
                   where u.route = flowfabric.ready_route(e) and e.namespace <> all (u.served))
       and not exists (select from flowfabric.claim_grant g
                       where g.partition = e.partition and g.id = e.id and g.expires_at > p_now)
$$;
