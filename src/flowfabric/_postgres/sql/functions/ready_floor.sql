-- Ready rows, and the position below which a route has none.
--
-- A claimed ready row leaves a dead index entry that an old snapshot anywhere keeps alive, and a scan from the
-- beginning of the route crawls over all of them. So claims start at the floor. Two rules keep it true:
--   * who inserts ready rows holds the route's advisory lock shared until commit, and lowers the floor if the new
--     row lies below it (by adding a row, never by waiting for one);
--   * who raises it holds that lock exclusively (or gives up at once), so no insert is under way that it cannot see.

-- The first number of the advisory lock; the second is the route.
create or replace function flowfabric.ready_lock() returns integer
language sql immutable as $$ select 708301 $$;

-- raise_floor: move the floor of a route up to its first live ready row; does nothing when somebody inserts.
create or replace function flowfabric.raise_floor(p_route integer) returns void
language plpgsql as $$
declare
    v_first flowfabric.ready;
    v_rank integer; v_created timestamptz; v_id uuid;
begin
    -- A snapshot older than the lock would not see what was inserted before it.
    if current_setting('transaction_isolation') <> 'read committed'
       or not pg_try_advisory_xact_lock(flowfabric.ready_lock(), p_route) then
        return;
    end if;
    select f.rank, f.created_at, f.id into v_rank, v_created, v_id
    from flowfabric.ready_floor f where f.route = p_route order by f.rank, f.created_at, f.id limit 1;
    select r.* into v_first from flowfabric.ready r
    where r.route = p_route
      and (r.rank, r.created_at, r.id) >= (coalesce(v_rank, -1), coalesce(v_created, '-infinity'),
                                           coalesce(v_id, '00000000-0000-0000-0000-000000000000'))
    order by r.rank, r.created_at, r.id limit 1;
    if found then
        v_rank := v_first.rank; v_created := v_first.created_at; v_id := v_first.id;
    end if;
    -- An empty route keeps the lowest of its positions, which is as good as any, and loses the others.
    if v_rank is not null then
        delete from flowfabric.ready_floor f where f.route = p_route;
        insert into flowfabric.ready_floor values (p_route, v_rank, v_created, v_id);
    end if;
end;
$$;

-- hold_routes: to be called before ready rows of these routes are inserted.
create or replace function flowfabric.hold_routes(p_routes integer[]) returns void
language plpgsql as $$
declare
    v_route integer;
begin
    if cardinality(p_routes) = 1 then
        perform pg_advisory_xact_lock_shared(flowfabric.ready_lock(), p_routes[1]);
        return;
    end if;
    for v_route in select distinct r from unnest(p_routes) r order by r loop
        perform pg_advisory_xact_lock_shared(flowfabric.ready_lock(), v_route);
    end loop;
end;
$$;

-- lower_floor: to be called after ready rows were inserted, with their positions.
create or replace function flowfabric.lower_floor(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_ids uuid[]) returns void
language plpgsql as $$
declare
    v_fixed_snapshot boolean := current_setting('transaction_isolation') <> 'read committed';
begin
    -- A snapshot taken long ago cannot tell where the floor is now: lower it in any case.
    insert into flowfabric.ready_floor (route, rank, created_at, id)
    select n.route, n.rank, n.created_at, n.id
    from (select distinct on (u.route) u.* from unnest(p_routes, p_ranks, p_created, p_ids)
              as u (route, rank, created_at, id)
          order by u.route, u.rank, u.created_at, u.id) n
    where v_fixed_snapshot
       or (exists (select from flowfabric.ready_floor f where f.route = n.route)
           and not exists (select from flowfabric.ready_floor f where f.route = n.route
                           and (f.rank, f.created_at, f.id) <= (n.rank, n.created_at, n.id)));
end;
$$;

-- make_ready: insert the ready rows of executions that may be claimed again, in their old place.
--
-- Members of flows that may not be claimed are held back instead (see gate).
create or replace function flowfabric.make_ready(p_partition integer[], p_id uuid[], p_available_at timestamptz)
returns void
language plpgsql as $$
declare
    v_routes integer[]; v_ranks integer[]; v_created timestamptz[]; v_ids uuid[];
begin
    select g.partitions, g.ids into p_partition, p_id from flowfabric.gate(p_partition, p_id) g;
    select array_agg(e.route), array_agg(9000 - e.priority), array_agg(e.created_at), array_agg(e.id)
    into v_routes, v_ranks, v_created, v_ids
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    if v_routes is null then
        return;
    end if;
    perform flowfabric.hold_routes(v_routes);
    insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at, available_at)
    select e.route, 9000 - e.priority, e.created_at, e.id, e.partition, e.deadline_at, p_available_at
    from unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    perform flowfabric.lower_floor(v_routes, v_ranks, v_created, v_ids);
    perform flowfabric.wake_workers();
end;
$$;

-- drop_ready: remove the ready rows of executions, if they have one, and any grant with them.
create or replace function flowfabric.drop_ready(p_partition integer[], p_id uuid[]) returns void
language plpgsql as $$
begin
    delete from flowfabric.ready r
    using unnest(p_partition, p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    where r.route = e.route and r.rank = 9000 - e.priority and r.created_at = e.created_at and r.id = e.id
      and r.partition = e.partition;
    delete from flowfabric.claim_grant g
    using unnest(p_partition, p_id) as u (partition, id)
    where g.partition = u.partition and g.id = u.id;
end;
$$;
