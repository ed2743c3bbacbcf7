-- Wake-ups are hints: a submission notifies as many sleeping workers as it has work for, each on its own channel, and none
-- if none sleeps. A worker announces its sleep, polls once more, then sleeps; a worker that was woken and leaves work
-- behind wakes the next (claim). No row is locked to the end of a caller's transaction. Correctness rests on polling.

-- wake_workers: notify sleeping workers that there is work; one route for each ready row.
create or replace function flowfabric.wake_workers(p_routes integer[]) returns void
language plpgsql as $$
declare
    v record;
begin
    if cardinality(p_routes) = 1 then
        perform flowfabric.wake_route(p_routes[1], 1);
        return;
    end if;
    for v in select u.route, count(*)::integer as n from unnest(p_routes) as u (route) where u.route is not null group by u.route
    loop
        perform flowfabric.wake_route(v.route, v.n);
    end loop;
end;
$$;

-- wake_route: notify up to p_items sleeping workers that serve a route, those with the most free slots first; and as many
-- of those that serve one namespace only, because the work may be of it, or of another one.
--
-- A transaction that is to be prepared (two-phase commit) must not notify: it turns flowfabric.wake off (see wake_duties).
-- The clock is read in a subquery, once: compared with a volatile function, the index would be read from its beginning.
create or replace function flowfabric.wake_route(p_route integer, p_items integer) returns void
language plpgsql as $$
begin
    -- Under load no worker sleeps: this is cheaper than starting the query that chooses.
    if exists (select from flowfabric.sleeper x where x.lane = (select r.lane from flowfabric.route r where r.id = p_route)
               and x.until > (select clock_timestamp())) then
        perform flowfabric.wake_sleepers(p_route, p_items);
    end if;
end;
$$;

-- wake_sleepers: wake_route for a caller that knows that a worker sleeps.
create or replace function flowfabric.wake_sleepers(p_route integer, p_items integer) returns void
language plpgsql as $$
begin
    perform pg_notify('flowfabric_' || c.instance, 'work')
    from (select s.instance, row_number() over (partition by s.is_open order by s.slots desc, random()) as place
          from (select x.instance, x.slots, x.namespace is null as is_open
                from flowfabric.route r
                join flowfabric.sleeper x on x.lane = r.lane and x.until > (select clock_timestamp())
                join flowfabric.service v on v.id = x.service and (v.kinds is null or r.kind = any (v.kinds))
                     and r.capabilities <@ v.capabilities
                     and ((r.version is null and r.not_for is null) or (v.kinds is null and r.not_for is null)
                          or flowfabric.serves(v.id, r.kind, r.version, r.not_for))
                where r.id = p_route and current_setting('flowfabric.wake', true) is distinct from 'off'
                order by x.until desc limit 64) s) c
    where c.place <= p_items;
end;
$$;

-- wake_process: notify one process that there may be work; null: none.
create or replace function flowfabric.wake_process(p_instance uuid) returns void
language sql volatile as $$
    select pg_notify('flowfabric_' || p_instance, 'work')
    where p_instance is not null and current_setting('flowfabric.wake', true) is distinct from 'off'
$$;

-- wake_for: the same for executions that are ready, and that a claim may have skipped because they were locked.
create or replace function flowfabric.wake_for(p_partition integer[], p_id uuid[]) returns void
language sql volatile as $$
    select flowfabric.wake_workers(array_agg(flowfabric.ready_route(e)))
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where e.state in ('waiting', 'resumable')
    having count(*) > 0
$$;
