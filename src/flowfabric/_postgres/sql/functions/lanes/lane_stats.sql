-- lane_stats: what waits, since when, and what runs. Members of flows that wait for their dependencies are counted by their flow.
--
-- Roles    read, operate
create or replace function flowfabric.lane_stats(p_names text[])
returns table (name text, state text, depth bigint, oldest_at timestamptz, delayed bigint, waiting_children bigint, running bigint, at timestamptz)
language sql volatile security definer as $$
    with running as (
        select r.lane, count(*) as n
        from (select distinct u.partition, u.id from flowfabric.timer t
              cross join lateral unnest(t.partitions, t.ids) as u (partition, id) where t.kind = 'lease') p
        join flowfabric.execution e on e.partition = p.partition and e.id = p.id and e.state = 'active'
        join flowfabric.route r on r.id = e.route
        where e.lease_lost is null group by r.lane
    ), delayed as (
        select r.lane, count(*) as n
        from (select distinct u.partition, u.id from flowfabric.timer t
              cross join lateral unnest(t.partitions, t.ids) as u (partition, id) where t.kind = 'delay') p
        join flowfabric.execution e on e.partition = p.partition and e.id = p.id and e.state = 'delayed'
        join flowfabric.route r on r.id = e.route group by r.lane
    ), parked as (
        select r.lane, count(*) as n
        from (select u.partition, u.id from flowfabric.timer t
              cross join lateral unnest(t.partitions, t.ids) as u (partition, id) where t.kind = 'parked'
              union
              select w.partition, w.id from flowfabric.waiter w) p
        join flowfabric.execution e on e.partition = p.partition and e.id = p.id and e.state = 'waiting_children'
        join flowfabric.route r on r.id = e.route group by r.lane
    ), waiting as (
        select r.lane, count(*) as n, min(y.created_at) as oldest
        from flowfabric.ready y join flowfabric.route r on r.id = y.route group by r.lane
    )
    select l.name, l.state, coalesce(w.n, 0), w.oldest, coalesce(d.n, 0), coalesce(p.n, 0), coalesce(x.n, 0), flowfabric.now()
    from flowfabric.lane l
    left join waiting w on w.lane = l.name
    left join delayed d on d.lane = l.name
    left join parked p on p.lane = l.name
    left join running x on x.lane = l.name
    where p_names is null or l.name = any (p_names)
    order by l.name
$$;
