-- Ready rows, and the floor of a route: the position below which it has none. A route without a floor has no ready row.
--
-- A claimed ready row leaves a dead index entry that an old snapshot anywhere keeps alive, and a scan from the beginning
-- of the route reads all of them. Therefore claims start at the lowest floor row, and visit only routes that have one.
-- A floor row that is written together with a ready row is always right: a snapshot that shows one shows the other. Writing one
-- for each ready row is not necessary, because most are above a floor that exists. Three rules make that safe:
--   * a call that inserts ready rows announces the lowest of their positions, as an advisory lock held to the end of its
--     transaction, and then checks whether the floor is being raised (announce_ready);
--   * a call that raises the floor holds another advisory lock of the route, and reads the announcements before anything
--     else: it never raises the floor above one of them (raise_floors);
--   * a call that was announced, and saw no raise under way, relies on the floor that a later statement reads. A raise
--     that began after this check sees the announcement; one that ended before is visible. All others write a floor row.

-- cover_ready: called after ready rows were inserted, with their positions: no floor may be above them.
create or replace function flowfabric.cover_ready(
    p_routes integer[], p_ranks integer[], p_created timestamptz[], p_ids uuid[]) returns void
language plpgsql as $$
declare
    v_routes integer[]; v_ranks integer[]; v_created timestamptz[]; v_ids uuid[]; v_known boolean[];
    v_now timestamptz;
begin
    if cardinality(p_ids) = 1 then
        perform flowfabric.cover_one(p_routes[1], p_ranks[1], p_created[1], p_ids[1], flowfabric.now());
        return;
    end if;
    v_now := flowfabric.now();
    select array_agg(n.route), array_agg(n.rank), array_agg(n.created_at), array_agg(n.id),
           array_agg(flowfabric.announce_ready(n.route, n.rank, n.oldest, v_now))
    into v_routes, v_ranks, v_created, v_ids, v_known
    from (select distinct on (u.route) u.*, min(u.created_at) over (partition by u.route) as oldest
          from unnest(p_routes, p_ranks, p_created, p_ids) as u (route, rank, created_at, id)
          order by u.route, u.rank, u.created_at, u.id) n;
    insert into flowfabric.ready_floor (lane, route, rank, created_at, id)
    select r.lane, n.route, n.rank, n.created_at, n.id
    from unnest(v_routes, v_ranks, v_created, v_ids, v_known) as n (route, rank, created_at, id, known)
    join flowfabric.route r on r.id = n.route
    where not n.known or not exists (select from flowfabric.ready_floor f where f.lane = r.lane and f.route = n.route
                                     and (f.rank, f.created_at, f.id) <= (n.rank, n.created_at, n.id));
end;
$$;

-- cover_one: the same for one ready row. Returns whether workers of its lane sleep (wake_route notifies them).
create or replace function flowfabric.cover_one(
    p_route integer, p_rank integer, p_created timestamptz, p_id uuid, p_now timestamptz) returns boolean
language plpgsql as $$
declare
    v_is_known boolean := flowfabric.announce_ready(p_route, p_rank, p_created, p_now);
    v_lane text;
    v_is_above boolean;
    v_is_awaited boolean;
begin
    -- Nearly always there is a floor already.
    select r.lane, exists (select from flowfabric.ready_floor f where f.lane = r.lane and f.route = p_route
                           and (f.rank, f.created_at, f.id) <= (p_rank, p_created, p_id)),
           exists (select from flowfabric.sleeper s where s.lane = r.lane and s.until > (select clock_timestamp()))
    into v_lane, v_is_above, v_is_awaited
    from flowfabric.route r where r.id = p_route;
    if not v_is_known or not v_is_above then
        insert into flowfabric.ready_floor (lane, route, rank, created_at, id)
        values (v_lane, p_route, p_rank, p_created, p_id);
    end if;
    return v_is_awaited;
end;
$$;

-- announce_ready: announce ready rows at or above a position; returns whether the floor can be relied upon.
--
-- Never waits. An older snapshot does not show the floor as it is.
create or replace function flowfabric.announce_ready(
    p_route integer, p_rank integer, p_created timestamptz, p_now timestamptz) returns boolean
language plpgsql as $$
begin
    return case
        when current_setting('transaction_isolation') <> 'read committed' then false
        when not pg_try_advisory_xact_lock_shared(
            flowfabric.ready_lock(p_route), flowfabric.ready_place(p_rank, p_created, p_now)) then false
        when not pg_try_advisory_lock_shared(flowfabric.ready_lock(p_route), -1) then false   -- it is being raised
        else pg_advisory_unlock_shared(flowfabric.ready_lock(p_route), -1) end;
end;
$$;

-- ready_place: a position, rounded down to 31 bits: a sixteenth of the ranks, and tenths of a second, which begin anew
-- after 155 days. Older rows have no time.
create or replace function flowfabric.ready_place(p_rank integer, p_created timestamptz, p_now timestamptz) returns integer
language sql stable as $$
    select ((p_rank / 600) << 27)
           | case when p_created < p_now - interval '100 days' then 0
                  else 1 + (floor(date_part('epoch', p_created) * 10)::bigint % 134217727)::integer end
$$;

-- place_rank: the rank that such a number stands for.
create or replace function flowfabric.place_rank(p_place bigint) returns integer
language sql immutable as $$ select ((p_place >> 27) * 600)::integer $$;

-- place_time: the time that such a number stands for.
create or replace function flowfabric.place_time(p_place bigint, p_now timestamptz) returns timestamptz
language sql stable as $$
    select case when p_place & 134217727 = 0 then timestamptz '-infinity'
                else to_timestamp((n.tick - (n.tick - ((p_place & 134217727) - 1) + 134217727::bigint * 1000) % 134217727) / 10.0) end
    from (select floor(date_part('epoch', p_now) * 10)::bigint as tick) n
$$;
