-- list_versions: which versions still have executions, and how many live workers serve each
--
-- For people: its cost grows with what has not ended. It reads nothing if no task has a version: no execution began with
-- one, and no live worker names one.
-- Roles    read, work, operate
-- Returns  one row per lane, kind, capabilities and version in which executions began that have not ended: how many they
--          are, and how many workers that are alive serve them. Version null: executions that began without one, of tasks
--          that have versions; every worker of the task serves them. Of those that are ready, 10,000 of a route are seen.
create or replace function flowfabric.list_versions()
returns table (lane text, kind text, capabilities text[], version integer, executions bigint, workers bigint)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_kinds text[];   -- that have versions
begin
    select array_agg(distinct k.kind) into v_kinds from (
        select r.kind from flowfabric.route r where r.version is not null
        union
        select u.kind from flowfabric.registration g join flowfabric.service s on s.id = g.service
        cross join lateral unnest(s.kinds, s.versions) as u (kind, version)
        where s.versions is not null and u.version is not null and flowfabric.is_alive(g, v_now)) k;
    if v_kinds is null then
        return;
    end if;
    return query
    with unended as materialized (
        select r.partition, r.id from flowfabric.ready r
        join flowfabric.route q on q.id = r.route and q.version is not null
        union
        -- Most of these have not started, and there may be millions.
        select r.partition, r.id from flowfabric.route q
        cross join lateral (select w.partition, w.id from flowfabric.ready w where w.route = q.id
                            order by w.rank, w.created_at, w.id limit 10000) r
        where q.version is null and q.kind = any (v_kinds)
        union
        select u.partition, u.id from flowfabric.timer t cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
        where t.kind in ('lease', 'delay', 'parked')
        union
        select w.partition, w.id from flowfabric.waiter w
        union
        select s.partition, s.id from flowfabric.suspension s where s.closed_at is null
        union
        select b.partition, b.id from flowfabric.blocked b
    ), begun as materialized (
        select coalesce(e.pinned, e.route) as route, count(*) as n from unended o
        join flowfabric.execution e on e.partition = o.partition and e.id = o.id
        where e.attempt_index is not null and e.completed_at is null
        group by 1
    ), alive as materialized (
        select g.lanes, s.id as service, s.kinds, s.capabilities
        from flowfabric.registration g join flowfabric.service s on s.id = g.service
        where flowfabric.is_alive(g, v_now)
    )
    select r.lane, r.kind, r.capabilities, r.version, b.n,
           (select count(*) from alive a
            where r.lane = any (a.lanes) and r.capabilities <@ a.capabilities
              and (a.kinds is null or flowfabric.serves(a.service, r.kind, r.version, null)))
    from begun b join flowfabric.route r on r.id = b.route
    where r.kind = any (v_kinds)
    order by r.lane, r.kind, r.version nulls first, r.capabilities;
end;
$$;
