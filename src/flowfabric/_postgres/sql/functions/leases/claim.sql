-- claim: take up to p_limit executions of a lane, best rank first
--
-- Called by workers. Serves the routes of the lane whose kind and capabilities the worker has.
-- Locks    ready rows and their executions, skipping locked rows; it never waits.
-- Returns  one row per lease, best first; no row without work.
-- Plans    a freshly filled table has no statistics: the settings keep the scan in index order.
create or replace function flowfabric.claim(
    p_lane text, p_kinds text[], p_capabilities text[], p_worker text, p_instance text, p_ttl_ms bigint, p_limit integer)
returns setof flowfabric.claimed
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_routes integer[];
    v_share integer[];       -- how many to take of each route
    v_taken flowfabric.taken;
    v_pass integer := 0;
    v_partitions integer[] := '{}';
    v_ids uuid[] := '{}';
    v_tids tid[] := '{}';
    v_more integer;
    v_again boolean := false;
    v_auto_reclaim boolean;
    v_lost boolean;          -- a lost lease is among the best
begin
    select flowfabric.now(), d.auto_reclaim,
           (select array_agg(r.id order by r.id) from flowfabric.lane l join flowfabric.route r on r.lane = l.name
            where l.name = p_lane and l.state in ('active', 'draining')
              and (p_kinds is null or r.kind = any (p_kinds)) and r.capabilities <@ p_capabilities)
    into v_now, v_auto_reclaim, v_routes
    from flowfabric.deployment d;
    if v_routes is null then
        return;
    end if;

    if cardinality(v_routes) > 1 then
        loop
            -- First read which routes have the best ranks, without locks; then take that many from each.
            select array_agg(n.share order by n.route), bool_or(n.lost) into v_share, v_lost
            from (select q.route, count(b.route)::integer as share, bool_or(b.available_at is not null) as lost
                  from unnest(v_routes) as q (route)
                  left join (select c.route, c.available_at from unnest(v_routes) as w (route)
                             cross join lateral (select * from flowfabric.candidates(w.route, p_limit, v_auto_reclaim, v_now)) c
                             order by c.rank, c.created_at, c.id limit p_limit) b on b.route = q.route
                  group by q.route) n;
            exit when not coalesce(v_lost, false);
            -- An execution at its reclaim cap ends here: otherwise it would count towards this route and a lower-ranked
            -- row would be taken.
            select array_agg(x.partition), array_agg(x.id) into v_partitions, v_ids
            from (select e.partition, e.id
                  from (select c.* from unnest(v_routes) as w (route)
                        cross join lateral (select * from flowfabric.candidates(w.route, p_limit, v_auto_reclaim, v_now)) c
                        order by c.rank, c.created_at, c.id limit p_limit) b
                  join flowfabric.ready r on r.route = b.route and r.rank = b.rank and r.created_at = b.created_at and r.id = b.id
                  join flowfabric.execution e on e.partition = r.partition and e.id = r.id
                  where b.available_at is not null and e.lease_lost is not null
                    and e.reclaims >= flowfabric.reclaim_cap(e.policy, null)
                  for update of r skip locked
                  for no key update of e skip locked) x;
            exit when v_ids is null;
            perform flowfabric.end_capped(v_partitions, v_ids, flowfabric.now());
        end loop;
        v_partitions := '{}'; v_ids := '{}';
    else
        v_share := array[p_limit];
    end if;

    -- The second pass fills up from any route if concurrent claims were faster in the first.
    while v_pass < 2 and cardinality(v_ids) < p_limit loop
        for i in 1 .. cardinality(v_routes) loop
            v_more := least(p_limit - cardinality(v_ids),
                            case when v_pass = 0 then v_share[i] else p_limit end);
            continue when v_more <= 0;
            v_taken := flowfabric.take_ready(v_routes[i], v_more, v_auto_reclaim, v_now);
            v_partitions := v_partitions || v_taken.partitions;
            v_ids := v_ids || v_taken.ids;
            v_tids := v_tids || v_taken.tids;
            v_again := v_again or v_taken.again;
        end loop;
        exit when cardinality(v_routes) = 1;
        v_pass := v_pass + 1;
    end loop;

    if cardinality(v_ids) > 0 then
        v_now := flowfabric.now();   -- not earlier than anything seen before
        if cardinality(v_routes) = 1 or cardinality(v_ids) = 1 then
            return query select * from flowfabric.start_attempts(
                v_tids, null, null, p_worker, p_instance, p_ttl_ms, null, null, null, null,
                v_again, v_now);
        else
            -- Taken route by route, returned in claim order.
            return query select * from flowfabric.start_attempts(
                v_tids, null, null, p_worker, p_instance, p_ttl_ms, null, null, null, null,
                v_again, v_now) s order by s.priority desc, s.created_at, s.id;
        end if;
        -- Occasionally the floor follows the claims; a chance per row makes this independent of the batch size.
        if random() < cardinality(v_ids) / 2000.0 then
            for i in 1 .. cardinality(v_routes) loop
                perform flowfabric.raise_floor(v_routes[i]);
            end loop;
        end if;
    end if;
end;
$$;
