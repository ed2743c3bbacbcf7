-- scan_eligible: ids of claimable executions, in claim order. For schedulers and tests, not for workers.
create or replace function flowfabric.scan_eligible(p_lane text, p_partition integer, p_limit integer)
returns table (partition integer, id uuid)
language sql stable security definer as $$
    select r.partition, r.id
    from flowfabric.route q join flowfabric.ready r on r.route = q.id
    join flowfabric.execution e on e.partition = r.partition and e.id = r.id
    where q.lane = p_lane and (p_partition is null or r.partition = p_partition)
      and e.state in ('waiting', 'resumable') and e.blocking_reason = 'waiting_for_worker'
    order by r.rank, r.created_at, r.id limit p_limit
$$;
