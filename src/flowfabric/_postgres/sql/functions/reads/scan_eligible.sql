-- scan_eligible: ids of claimable executions, in claim order. For schedulers and tests, not for workers.
--
-- Roles    operate
create or replace function flowfabric.scan_eligible(p_lane text, p_partition integer, p_limit integer)
returns table (partition integer, id uuid)
language sql stable security definer as $$
    select x.partition, x.id
    from flowfabric.route q
    cross join lateral (
        select r.partition, r.id, r.rank, r.created_at from flowfabric.ready r
        cross join lateral (select from flowfabric.execution e
                            where e.partition = r.partition and e.id = r.id and e.state in ('waiting', 'resumable')
                              and e.blocking_reason = 'waiting_for_worker'
                              and not exists (select from flowfabric.uncovered u
                                              where u.route = q.id and e.namespace <> all (u.served)) offset 0) e
        where r.route = q.id and (p_partition is null or r.partition = p_partition)
        order by r.rank, r.created_at, r.id limit p_limit) x
    where q.lane = p_lane
    order by x.rank, x.created_at, x.id limit p_limit
$$;
