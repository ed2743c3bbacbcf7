-- find_unserved: of these executions, those that wait for a worker although none that is alive serves them
--
-- Called by clients that have waited for a result for some time, to say why nothing happens.
-- Roles    read, submit, work, operate
-- Returns  one row per route and namespace: the position of its first execution, what a worker would have to serve (in
--          which version; with other code, if changed code stopped it), the state of the lane (a worker claims nothing from
--          a paused or disabled one), and how many workers are alive.
--          A process that waits for work without being registered (claim with max_wait) serves it too.
create or replace function flowfabric.find_unserved(p_partition integer[], p_id uuid[])
returns table (ordinal integer, lane text, lane_state text, kind text, capabilities text[], namespace text, workers integer,
               version integer, is_stopped boolean)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
begin
    return query
    with waiting as materialized (
        select flowfabric.ready_route(e) as route, e.namespace, min(u.ordinal)::integer as ordinal
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ordinal)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        where e.state in ('waiting', 'resumable') or (e.state = 'active' and e.lease_lost is not null)
        group by flowfabric.ready_route(e), e.namespace
    ), alive as materialized (
        select true as is_registered, g.namespace, g.lanes, s as service
        from flowfabric.registration g join flowfabric.service s on s.id = g.service
        where flowfabric.is_alive(g, v_now) and exists (select from waiting)
        union all
        select false, coalesce(p.namespace, ''), array[p.lane], s
        from (select distinct r.lane from waiting w join flowfabric.route r on r.id = w.route) o
        join flowfabric.sleeper p on p.lane = o.lane and p.until > (select clock_timestamp())
        join flowfabric.service s on s.id = p.service
    )
    select w.ordinal, r.lane, l.state, r.kind, r.capabilities, w.namespace,
           (select count(*)::integer from alive a where a.is_registered), r.version, r.not_for is not null
    from waiting w join flowfabric.route r on r.id = w.route join flowfabric.lane l on l.name = r.lane
    where l.state in ('paused', 'disabled')
       or not exists (select from alive a
                      where a.namespace in ('', w.namespace) and r.lane = any (a.lanes) and flowfabric.covers(a.service, r))
    order by w.ordinal;
end;
$$;
