-- find_unserved: of these executions, those that wait for a worker although none that is alive serves them
--
-- Called by clients that have waited for a result for some time, to say why nothing happens.
-- Roles    read, submit, work, operate
-- Returns  one row per route and namespace: the position of its first execution, what a worker would have to serve, the
--          state of the lane (a worker claims nothing from a paused or disabled one), and how many workers are alive.
create or replace function flowfabric.find_unserved(p_partition integer[], p_id uuid[])
returns table (ordinal integer, lane text, lane_state text, kind text, capabilities text[], namespace text, workers integer)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
begin
    return query
    with waiting as materialized (
        select e.route, e.namespace, min(u.ordinal)::integer as ordinal
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ordinal)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        where e.state in ('waiting', 'resumable') or (e.state = 'active' and e.lease_lost is not null)
        group by e.route, e.namespace
    ), alive as materialized (
        select g.namespace, g.lanes, s.kinds, s.capabilities
        from flowfabric.registration g join flowfabric.service s on s.id = g.service
        where flowfabric.is_alive(g, v_now) and exists (select from waiting)
    )
    select w.ordinal, r.lane, l.state, r.kind, r.capabilities, w.namespace, (select count(*)::integer from alive)
    from waiting w join flowfabric.route r on r.id = w.route join flowfabric.lane l on l.name = r.lane
    where l.state in ('paused', 'disabled')
       or not exists (select from alive a
                      where a.namespace in ('', w.namespace) and r.lane = any (a.lanes)
                        and (a.kinds is null or r.kind = any (a.kinds)) and r.capabilities <@ a.capabilities)
    order by w.ordinal;
end;
$$;
