-- claim: take up to p_limit executions of a lane, best rank first
--
-- Called by workers. Serves the routes of the lane whose kind, version and capabilities the worker has, and whose executions
-- its code did not stop.
-- Takes    p_kinds: an array as text, which is read only if the lane has work; null: every kind, in every version.
--          p_service: what the worker serves, with versions and digests (register_service); null: kinds without either.
--          p_versioned: it has kinds with versions, in which executions begin.
--          p_sleeper, p_asleep: the announcement of the process, if it has one; removed when there is work.
--          p_namespace: the only namespace it takes from, not the default one; null: all of them.
--          p_alone: without work, say which routes no live worker covers (judge_for_claim), and raise for a damaged budget;
--          false: claim_lanes does. The polls of a process that sleeps leave the former to the duty.
-- Locks    ready rows and their executions, skipping locked rows; it waits only for the quota policies of executions with
--          limits (limits/take_admitted.sql), before it locks anything else.
-- Returns  one row per lease, best first; no row without work, or if a call that moves denied executions aside has not come to
--          the end of them: it notifies a caller that announced its sleep, and others ask again.
-- Plans    a freshly filled table has no statistics: the settings keep the scan in index order.
-- Roles    work, operate
create or replace function flowfabric.claim(
    p_lane text, p_kinds text, p_capabilities text[], p_worker text, p_instance text, p_ttl_ms bigint, p_limit integer,
    p_sleeper uuid, p_asleep timestamptz, p_service integer, p_versioned boolean,
    p_namespace text, p_alone boolean)
returns setof flowfabric.claimed
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_auto_reclaim boolean;
    v_kinds text[];
    v_worker integer;
    -- The routes that may have work, and where their rows begin.
    v_routes integer[]; v_ranks integer[]; v_created timestamptz[]; v_floor_ids uuid[];
    v_limited boolean;
    v_best tid[];
    v_looks integer := 0;
    v_first integer;
    v_taken flowfabric.taken;
    v_partitions integer[] := '{}';
    v_ids uuid[] := '{}';
    v_tids tid[] := '{}';
    v_again boolean := false;
    v_from integer[]; v_to integer[];   -- routes, and those of the versions in which their executions begin
begin
    perform flowfabric.require_read_committed();
    select flowfabric.now(), d.auto_reclaim into v_now, v_auto_reclaim
    from flowfabric.deployment d, flowfabric.lane l
    where l.name = p_lane and l.state in ('active', 'draining')
      and exists (select from flowfabric.ready_floor f where f.lane = p_lane);
    if not found then
        return;
    end if;
    v_kinds := p_kinds::text[];
    select array_agg(q.route), array_agg(q.rank), array_agg(q.created_at), array_agg(q.id), bool_or(q.limited),
           (select w.id from flowfabric.worker w   -- as number_worker does
            where w.worker_instance_id = p_instance and w.worker_id = p_worker
              and w.numbered_at > v_now - interval '1 day' and w.unused_since is null limit 1)
    into v_routes, v_ranks, v_created, v_floor_ids, v_limited, v_worker
    from (select distinct on (f.route) f.route, f.rank, f.created_at, f.id, r.limited
          from flowfabric.ready_floor f
          cross join lateral (select x.* from flowfabric.route x where x.id = f.route offset 0) r
          where f.lane = p_lane and (v_kinds is null or r.kind = any (v_kinds)) and r.capabilities <@ p_capabilities
            and ((r.version is null and r.not_for is null) or (v_kinds is null and r.not_for is null)
                 or flowfabric.serves(p_service, r.kind, r.version, r.not_for))
          order by f.route, f.rank, f.created_at, f.id) q;
    if v_routes is null then
        if p_alone and p_asleep is null then
            perform flowfabric.judge_for_claim(p_lane, v_kinds, p_capabilities, p_service);
        end if;
        return;
    end if;

    -- Executions with limits pass a check of these, in the order of the others.
    if v_limited then
        v_taken := flowfabric.take_admitted(
            v_routes, v_ranks, v_created, v_floor_ids, p_namespace, p_limit, v_auto_reclaim, null,
            case when p_asleep is not null then p_sleeper end, p_alone, v_now);
    elsif p_namespace is not null then
        v_taken := flowfabric.take_best(v_routes, v_ranks, v_created, v_floor_ids, p_namespace, p_limit, v_auto_reclaim,
                                        null, v_now);
    end if;
    if v_limited or p_namespace is not null then
        v_partitions := v_taken.partitions; v_ids := v_taken.ids; v_tids := v_taken.tids; v_again := v_taken.again;
    end if;

    -- Several routes: read the best rows without locks, then take them. One that reached its reclaim cap ends instead
    -- of being claimed, and one that another claim was faster to take is missing: look again.
    while cardinality(v_routes) > 1 and cardinality(v_ids) < p_limit and not v_limited and p_namespace is null loop
        select array_agg(b.tid) into v_best
        from (select c.tid
              from unnest(v_routes, v_ranks, v_created, v_floor_ids) as q (route, rank, created_at, id)
              cross join lateral (
                  select r.ctid as tid, r.rank, r.created_at, r.id from flowfabric.ready r
                  where r.route = q.route and (r.rank, r.created_at, r.id) >= (q.rank, q.created_at, q.id)
                    and (r.granted_until is null or r.granted_until <= v_now)
                    and (r.deadline_at is null or r.deadline_at > v_now)
                    and (r.available_at is null or (v_auto_reclaim and r.available_at <= v_now))
                  order by r.rank, r.created_at, r.id limit p_limit - cardinality(v_ids)) c
              order by c.rank, c.created_at, c.id limit p_limit - cardinality(v_ids)) b;
        exit when v_best is null;
        v_taken := flowfabric.take_ready(v_best, null, null, null, null, p_limit, v_auto_reclaim, null, v_now);
        v_partitions := v_partitions || v_taken.partitions;
        v_ids := v_ids || v_taken.ids;
        v_tids := v_tids || v_taken.tids;
        v_again := v_again or v_taken.again;
        v_looks := v_looks + 1;
        exit when cardinality(v_taken.ids) < cardinality(v_best) and v_looks >= 3;
    end loop;

    -- One route, or rows that concurrent claims hold: take the first that are free, route by route.
    for i in 1 .. cardinality(v_routes) loop
        exit when cardinality(v_ids) >= p_limit or v_limited or p_namespace is not null
               or (cardinality(v_routes) > 1 and v_best is null);
        v_taken := flowfabric.take_ready(null, v_routes[i], v_ranks[i], v_created[i], v_floor_ids[i],
                                         p_limit - cardinality(v_ids), v_auto_reclaim, null, v_now);
        v_partitions := v_partitions || v_taken.partitions;
        v_ids := v_ids || v_taken.ids;
        v_tids := v_tids || v_taken.tids;
        v_again := v_again or v_taken.again;
    end loop;

    if cardinality(v_ids) > 0 then
        v_now := flowfabric.now();   -- not earlier than anything seen before
        if v_worker is null then
            v_worker := flowfabric.number_worker(p_worker, p_instance, v_now);
        end if;
        if p_versioned then
            select array_agg(q.id), array_agg(flowfabric.derive_route(q.id, q.version, null)) into v_from, v_to
            from (select r.id, s.versions[array_position(s.kinds, r.kind)] as version
                  from flowfabric.service s cross join unnest(v_routes) as u (route)
                  join flowfabric.route r on r.id = u.route
                  where s.id = p_service and r.version is null and r.not_for is null
                  order by r.id offset 0) q   -- two claims that create the same ones do not wait for each other
            where q.version is not null;
        end if;
        if (cardinality(v_routes) = 1 and not v_limited) or cardinality(v_ids) = 1 then
            return query select * from flowfabric.start_attempts(
                v_tids, null, null, v_worker, p_ttl_ms, null, null, null, null,
                v_again, v_from, v_to, v_now);
        else
            -- Returned in claim order, however they were taken.
            return query select * from flowfabric.start_attempts(
                v_tids, null, null, v_worker, p_ttl_ms, null, null, null, null,
                v_again, v_from, v_to, v_now) s order by s.priority desc, s.created_at, s.id;
        end if;
    end if;
    if cardinality(v_ids) > 0 and p_asleep is not null then
        delete from flowfabric.sleeper s where s.lane = p_lane and s.until = p_asleep and s.instance = p_sleeper;
    end if;
    -- Work is left: the next worker may sleep.
    if cardinality(v_ids) = p_limit
       and exists (select from flowfabric.sleeper s where s.lane = p_lane and s.until > (select clock_timestamp())) then
        perform flowfabric.wake_workers(v_routes[1:8]);
    end if;
    -- Occasionally the floor follows the claims; a chance per row makes this independent of the batch size. Without work,
    -- routes that seem to have some are looked at again, twenty at a time.
    v_first := 1 + floor(random() * greatest(1, cardinality(v_routes) - 19))::integer;
    if cardinality(v_ids) > 0 then
        if random() < cardinality(v_ids) / 500.0 then
            perform flowfabric.raise_floors(p_lane, v_routes[v_first:v_first + 19]);
        end if;
    elsif v_created[v_first] < v_now - interval '5 seconds' and random() < 0.2 then
        perform flowfabric.raise_floors(p_lane, v_routes[v_first:v_first + 19]);
    end if;
    if p_alone and p_asleep is null and cardinality(v_ids) = 0 then
        perform flowfabric.judge_for_claim(p_lane, v_kinds, p_capabilities, p_service);
    end if;
end;
$$;
