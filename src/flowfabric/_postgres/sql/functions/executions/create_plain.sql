-- create_plain: executions of one route with only a payload, one policy, and who submits them
--
-- The most common call, in as few statements as possible: each costs time on a cold connection.
-- p_creator  one for all, or one for each; null: none.
-- Returns  whether they were made: false when the route is new or closed, or has bindings.
create or replace function flowfabric.create_plain(
    p_lane text, p_kind text, p_capabilities text, p_partition integer[], p_id uuid[], p_payload bytea[], p_policy json,
    p_creator text[])
returns boolean
language plpgsql as $$
declare
    v_now timestamptz;
    v_route integer;
    v_known boolean;
    v_covered boolean;
    v_wakes boolean;
begin
    select flowfabric.now(), r.id into v_now, v_route
    from flowfabric.route r, flowfabric.lane l
    where r.lane = p_lane and r.kind = p_kind and r.digest = md5(p_capabilities)
      and r.is_free and l.name = p_lane and l.state in ('active', 'paused');
    if not found then
        return false;
    end if;
    if p_policy is not null then
        perform flowfabric.check_policy(p_policy);
    end if;
    if cardinality(p_id) = 1 then
        insert into flowfabric.execution
            (partition, id, route, created_at, namespace, creator, payload, policy, state, blocking_reason, pending,
             priority, transitioned_at)
        values (p_partition[1], p_id[1], v_route, v_now, '', coalesce(p_creator[1], ''), p_payload[1], p_policy, 'waiting',
                'waiting_for_worker', 'first', 0, v_now);
        insert into flowfabric.ready (route, rank, created_at, id, partition)
        values (v_route, flowfabric.rank_of(0), v_now, p_id[1], p_partition[1]);
    else
        with made as (
            insert into flowfabric.execution
                (partition, id, route, created_at, namespace, creator, payload, policy, state, blocking_reason, pending,
                 priority, transitioned_at)
            select u.partition, u.id, v_route, v_now, '', coalesce(u.creator, p_creator[1], ''), u.payload, p_policy,
                   'waiting', 'waiting_for_worker', 'first', 0, v_now
            from unnest(p_partition, p_id, p_payload, p_creator) as u (partition, id, payload, creator)
        )
        insert into flowfabric.ready (route, rank, created_at, id, partition)
        select v_route, flowfabric.rank_of(0), v_now, u.id, u.partition
        from unnest(p_partition, p_id) as u (partition, id);
    end if;
    v_known := flowfabric.announce_ready(v_route, flowfabric.rank_of(0), v_now, v_now);
    select exists (select from flowfabric.ready_floor f where f.lane = p_lane and f.route = v_route
                   and (f.rank, f.created_at) < (flowfabric.rank_of(0), v_now)),
           exists (select from flowfabric.sleeper s where s.lane = p_lane and s.until > (select clock_timestamp()))
    into v_covered, v_wakes;
    if not (v_known and v_covered) then   -- as cover_ready does
        insert into flowfabric.ready_floor (lane, route, rank, created_at, id)
        values (p_lane, v_route, flowfabric.rank_of(0), v_now, flowfabric.zero_uuid());
    end if;
    if v_wakes then
        perform flowfabric.wake_sleepers(v_route, cardinality(p_id));
    end if;
    return true;
end;
$$;
