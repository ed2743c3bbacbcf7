-- promote_limited: rate_limited -> claimable, for up to p_count executions (at most 1,000) that a limit holds, best rank first
--
-- Called by every call that opens the limit, which holds its lock. Executions that are locked, or that wait for amounts
-- which a budget does not have, are left for the duty. Wakes workers, and the duty if more are left.
-- Takes    p_key: of a quota policy; null: a budget. p_namespace, p_tag_key, p_tag_value: only executions of this tenant; null:
--          of all.
-- Locks    executions, skipping locked ones.
-- Returns  how many became claimable.
create or replace function flowfabric.promote_limited(
    p_limit uuid, p_key text, p_count integer, p_namespace text, p_tag_key text, p_tag_value text, p_now timestamptz)
returns integer
language plpgsql as $$
declare
    v_key text := coalesce(p_key, '');
    v_most integer := least(p_count, 1000);
    v_tids tid[]; v_partitions integer[]; v_ids uuid[];
    v_promoted integer;
begin
    if v_most <= 0 then
        return 0;
    end if;
    select array_agg(x.tid), array_agg(x.partition), array_agg(x.id) into v_tids, v_partitions, v_ids
    from (select b.ctid as tid, b.partition, b.id
          from flowfabric.blocked b
          cross join lateral (select y.ctid as tid from flowfabric.execution y
                              where y.partition = b.partition and y.id = b.id offset 0) f
          join flowfabric.execution e on e.ctid = f.tid
          where b.limit_id = p_limit and b.limit_key = v_key and e.state = 'rate_limited'
            and (p_namespace is null or e.namespace = p_namespace)
            and (p_tag_key is null or coalesce(e.tags ->> p_tag_key = p_tag_value, false))
            and (b.needs is null or flowfabric.budgets_cover(
                     (select l.budget_ids from flowfabric.limit_set l where l.digest = e.limits limit 1), b.needs))
          order by b.rank, b.created_at, b.id limit v_most
          for no key update of e skip locked) x;
    v_promoted := flowfabric.promote_rows(v_tids, v_partitions, v_ids);
    -- A page that is full, or rows that were locked: the duty continues.
    if (p_count >= 1000 or v_promoted < v_most) and num_nonnulls(p_namespace, p_tag_key) = 0
       and exists (select from flowfabric.blocked b where b.limit_id = p_limit and b.limit_key = v_key and b.needs is null) then
        perform flowfabric.look_at_limit(
            p_limit, v_key, case when v_promoted >= 1000 then p_now else p_now + interval '1 second' end, p_now);
    end if;
    return v_promoted;
end;
$$;

-- promote_unserved: make those of the first 100 executions that a quota policy holds claimable that no claim takes now
--
-- Otherwise the room would be handed to them, one after the other, and kept from those behind them. Their lane hands out no
-- work, or their route has a verdict (judge_routes.sql); the duty also asks which ones no live worker serves, if any worker
-- is registered.
-- Takes    p_first: how many will be promoted for the room: if all of these are served, nothing else is read. p_all: ask for
--          workers too.
-- Locks    executions, skipping locked ones.
create or replace function flowfabric.promote_unserved(
    p_limit uuid, p_key text, p_first integer, p_all boolean, p_now timestamptz) returns void
language plpgsql as $$
declare
    v_all boolean := p_all and exists (select from flowfabric.registration g where flowfabric.is_alive(g, p_now));
    v_tids tid[]; v_partitions integer[]; v_ids uuid[]; v_routes integer[]; v_namespaces text[];
    v_size integer;
begin
    if not v_all and not exists (select from flowfabric.uncovered)
       and not exists (select from flowfabric.lane l where l.state in ('paused', 'disabled')) then
        return;
    end if;
    foreach v_size in array case when p_first < 100 then array[p_first, 100] else array[100] end loop
        select array_agg(b.tid), array_agg(b.partition), array_agg(b.id), array_agg(flowfabric.ready_route(e)),
               array_agg(e.namespace)
        into v_tids, v_partitions, v_ids, v_routes, v_namespaces
        from (select y.ctid as tid, y.partition, y.id from flowfabric.blocked y
              where y.limit_id = p_limit and y.limit_key = p_key order by y.rank, y.created_at, y.id limit v_size) b
        cross join lateral (select x.* from flowfabric.execution x where x.partition = b.partition and x.id = b.id offset 0) e;
        with unserved as materialized (
            select u.route, u.namespace
            from (select distinct x.route, x.namespace from unnest(v_routes, v_namespaces) as x (route, namespace)) u
            join flowfabric.route r on r.id = u.route
            where exists (select from flowfabric.lane l where l.name = r.lane and l.state in ('paused', 'disabled'))
               or exists (select from flowfabric.uncovered c where c.route = u.route and u.namespace <> all (c.served))
               or v_all and not exists (
                      select from flowfabric.registration g join flowfabric.service s on s.id = g.service
                      where flowfabric.is_alive(g, p_now) and g.namespace in ('', u.namespace) and r.lane = any (g.lanes)
                        and flowfabric.covers(s, r))
                  and not exists (select from flowfabric.sleeper p
                                  where p.lane = r.lane and p.until > (select clock_timestamp()))
        )
        select array_agg(x.tid), array_agg(x.partition), array_agg(x.id) into v_tids, v_partitions, v_ids
        from (select h.tid, h.partition, h.id
              from unnest(v_tids, v_partitions, v_ids, v_routes, v_namespaces) as h (tid, partition, id, route, namespace)
              join unserved u on u.route = h.route and u.namespace = h.namespace
              cross join lateral (select y.ctid as tid from flowfabric.execution y
                                  where y.partition = h.partition and y.id = h.id offset 0) f
              join flowfabric.execution e on e.ctid = f.tid
              where e.state = 'rate_limited'
              for no key update of e skip locked) x;
        exit when v_ids is null;
    end loop;
    if flowfabric.promote_rows(v_tids, v_partitions, v_ids) >= 100 then
        perform flowfabric.look_at_limit(p_limit, p_key, p_now, p_now);
    end if;
end;
$$;

-- promote_rows: promote_limited for rows of `blocked` whose executions are locked; returns how many became claimable.
create or replace function flowfabric.promote_rows(p_tids tid[], p_partitions integer[], p_ids uuid[])
returns integer
language plpgsql as $$
declare
    v_partitions integer[]; v_ids uuid[]; v_gone uuid[];
    v_now timestamptz := flowfabric.now();   -- after they were moved aside: their callers may have read the time before
begin
    if p_ids is null then
        return 0;
    end if;
    with gone as (
        delete from flowfabric.blocked b where b.ctid = any (p_tids) and b.id = any (p_ids) returning b.id
    )
    select array_agg(g.id) into v_gone from gone g;
    if v_gone is null then
        return 0;
    end if;
    with promoted as (
        update flowfabric.execution e
        set state = case when e.resume_pending then 'resumable' else 'waiting' end, blocking_reason = 'waiting_for_worker',
            blocking_detail = null, transitioned_at = v_now, mutated_at = null
        from unnest(p_partitions, p_ids) as u (partition, id)
        where e.partition = u.partition and e.id = u.id and u.id = any (v_gone)
        returning e.partition, e.id
    )
    select array_agg(p.partition), array_agg(p.id) into v_partitions, v_ids from promoted p;
    perform flowfabric.make_ready(v_partitions, v_ids, null);
    return cardinality(v_gone);
end;
$$;

-- look_at_limit: have the duty check a limit at a time, unless it will earlier.
create or replace function flowfabric.look_at_limit(p_limit uuid, p_key text, p_due timestamptz, p_now timestamptz) returns void
language plpgsql as $$
begin
    insert into flowfabric.limit_due (due_at, limit_id, key)
    select p_due, p_limit, p_key
    where not exists (select from flowfabric.limit_due x where x.limit_id = p_limit and x.key = p_key and x.due_at between p_now and p_due);
    if found then
        perform flowfabric.wake_duties(p_due);
    end if;
end;
$$;

-- open_limit: promote what a limit has room for now
--
-- Called by the duty, and by every call that makes room. A rate is checked again when its window has room.
-- Takes    p_most: no more than that. p_wait: false: give up if the policy is locked. p_namespace and the tag: as promote_limited.
-- Locks    the head of the policy; a budget is only read.
-- Returns  how many became claimable; null: the policy is locked.
create or replace function flowfabric.open_limit(
    p_limit uuid, p_key text, p_most integer, p_wait boolean, p_namespace text, p_tag_key text, p_tag_value text)
returns integer
language plpgsql as $$
declare
    v_now timestamptz;
    v_room flowfabric.quota_room;
    v_left bigint := 1000;
    v_promoted integer;
    v_all boolean := num_nonnulls(p_namespace, p_tag_key) = 0;
begin
    if p_key = '' then
        if exists (select from flowfabric.exhausted_budgets(array[p_limit])) then
            return 0;
        end if;
        return flowfabric.promote_limited(
            p_limit, p_key, least(p_most, 1000), p_namespace, p_tag_key, p_tag_value, flowfabric.now());
    end if;
    if not (flowfabric.lock_heads(array[p_limit], array[p_key], case when p_wait then 'wait' else 'skip' end))[1] then
        return null;
    end if;
    v_now := flowfabric.now();
    select r.* into v_room from flowfabric.quota_rooms(array[p_limit], array[p_key], p_most, true, v_now) r;
    if found then
        v_left := least(case when v_room.rate > 0 then v_room.rate_left end,
                        case when v_room.cap > 0 then v_room.slots_left end);
    end if;
    if least(v_left, p_most) > 0 and v_all then
        perform flowfabric.promote_unserved(
            p_limit, p_key, least(v_left, p_most)::integer, p_most >= 1000, v_now);   -- an end is in a hurry
    end if;
    v_promoted := flowfabric.promote_limited(
        p_limit, p_key, least(v_left, p_most, 1000)::integer, p_namespace, p_tag_key, p_tag_value, v_now);
    if v_all and v_room.rate > 0 and v_left - v_promoted <= 0
       and exists (select from flowfabric.blocked b where b.limit_id = p_limit and b.limit_key = p_key) then
        -- Not for every entry of a window that was filled at once.
        perform flowfabric.look_at_limit(
            p_limit, p_key, greatest(coalesce(v_room.retry_at, v_now), v_now + interval '50 milliseconds'), v_now);
    end if;
    return v_promoted;
end;
$$;
