-- Lanes: named queues with a state: active; paused (takes work, gives none out); draining (gives out, takes none);
-- disabled (neither).

-- register_lanes: answers how many were new.
create or replace function flowfabric.register_lanes(p_names text[]) returns integer
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    with made as (
        insert into flowfabric.lane (name, registered_at, registered_by)
        select distinct n, flowfabric.now(), 'boot' from unnest(p_names) n order by n
        on conflict do nothing
        returning 1
    )
    select count(*)::integer from made
$$;

-- set_lane_state: answers the state before; registers an unknown lane.
create or replace function flowfabric.set_lane_state(p_name text, p_state text) returns text
language plpgsql security definer set search_path = flowfabric, pg_temp as $$
declare
    v_before text;
begin
    perform flowfabric.register_lanes(array[p_name]);
    select l.state into v_before from flowfabric.lane l where l.name = p_name for no key update;
    update flowfabric.lane l set state = p_state where l.name = p_name;
    if p_state in ('active', 'draining') then
        perform flowfabric.wake_workers();
    end if;
    return v_before;
end;
$$;

create or replace function flowfabric.list_lanes(p_after text, p_limit integer)
returns table (name text, state text, registered_at timestamptz, registered_by text)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select l.name, l.state, l.registered_at, l.registered_by from flowfabric.lane l
    where p_after is null or l.name > p_after collate "C" order by l.name limit p_limit
$$;

-- lane_stats: what waits, since when, and what runs.
create or replace function flowfabric.lane_stats(p_names text[])
returns table (name text, state text, depth bigint, oldest_at timestamptz, delayed bigint, running bigint, at timestamptz)
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    with running as (
        select r.lane, count(*) as n
        from (select distinct u.partition, u.id from flowfabric.timer t
              cross join lateral unnest(t.partitions, t.ids) as u (partition, id) where t.kind = 'lease') p
        join flowfabric.execution e on e.partition = p.partition and e.id = p.id and e.state = 'active'
        join flowfabric.route r on r.id = e.route
        where e.lease_lost is null group by r.lane
    ), delayed as (
        select r.lane, count(*) as n
        from (select u.partition, u.id from flowfabric.timer t
              cross join lateral unnest(t.partitions, t.ids) as u (partition, id) where t.kind in ('delay', 'parked')
              union
              select w.partition, w.id from flowfabric.waiter w) p
        join flowfabric.execution e on e.partition = p.partition and e.id = p.id and e.state = 'delayed'
        join flowfabric.route r on r.id = e.route group by r.lane
    ), waiting as (
        select r.lane, count(*) as n, min(y.created_at) as oldest
        from flowfabric.ready y join flowfabric.route r on r.id = y.route group by r.lane
    )
    select l.name, l.state, coalesce(w.n, 0), w.oldest, coalesce(d.n, 0), coalesce(x.n, 0), flowfabric.now()
    from flowfabric.lane l
    left join waiting w on w.lane = l.name
    left join delayed d on d.lane = l.name
    left join running x on x.lane = l.name
    where p_names is null or l.name = any (p_names)
    order by l.name
$$;
