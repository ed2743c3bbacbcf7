-- find: executions by any combination of filters, newest first
--
-- Every filter that could be rare has a narrow source in that order; the others are tested on the rows found. A call
-- reads at most p_budget rows and then returns where it stopped, so its cost is bounded.
-- Takes    p_stopped: only those that changed code stopped; p_by_end: by the time of their end instead of their creation, if
--          all states are ones of unsuccessful ends.
-- Returns  the matches, then one row without state that has the position to continue from, if there is more or the
--          budget ran out.
-- Roles    read, operate
create or replace function flowfabric.find(
    p_namespace text, p_lanes text[], p_kinds text[], p_states text[], p_tag_key text, p_tag_value text, p_flow uuid,
    p_from timestamptz, p_to timestamptz, p_before_at timestamptz, p_before_id uuid, p_before_partition integer,
    p_limit integer, p_budget integer, p_parent uuid, p_stopped boolean, p_by_end boolean)
returns setof flowfabric.execution_view
language plpgsql stable security definer as $$
declare
    v_at timestamptz := coalesce(p_before_at, 'infinity');
    v_id uuid := coalesce(p_before_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
    v_partition integer := coalesce(p_before_partition, 65536);
    v_from timestamptz := coalesce(p_from, '-infinity');
    v_chunk integer := least(greatest(p_limit * 2, 64), p_budget);
    v_seen integer := 0;
    v_found integer := 0;
    v_n integer;
    v_routes integer[];
    v_rank_routes integer[]; v_ranks integer[];
    v_times timestamptz[]; v_ids uuid[]; v_partitions integer[];
    v_row flowfabric.execution_view;
    v_last flowfabric.execution_view;   -- the last row read: a page may end there
    v_source text;
begin
    if p_to is not null and p_to <= v_at and not p_by_end then
        v_at := p_to; v_id := flowfabric.zero_uuid(); v_partition := -1;
    end if;
    select coalesce(array_agg(r.id), '{}') into v_routes from flowfabric.route r
    where (p_lanes is null or r.lane = any (p_lanes)) and (p_kinds is null or r.kind = any (p_kinds));
    v_source := case
        when p_by_end then 'ended'
        when p_stopped then 'stopped'
        when p_parent is not null then 'parent'
        when p_flow is not null then 'flow'
        when p_tag_key is not null then 'tag'
        when p_states <@ array['waiting', 'resumable', 'delayed', 'active', 'rate_limited', 'failed', 'cancelled',
                               'expired', 'skipped'] then 'state'
        when p_namespace <> '' then 'namespace'
        else 'route' end;
    if v_source = 'state' then
        select o.routes, o.ranks into v_rank_routes, v_ranks
        from flowfabric.ready_orders(case when p_states && array['waiting', 'resumable'] then v_routes end, 500) o;
        -- A very common state is not rare: a scan in order of creation finds it as fast.
        if v_ranks is null or not flowfabric.has_few_timers(
                array_remove(array[case when 'active' = any (p_states) then 'lease' end,
                                   case when 'delayed' = any (p_states) then 'delay' end], null), p_budget) then
            v_source := case when p_namespace <> '' then 'namespace' else 'route' end;
        end if;
    end if;
    loop
        case v_source
        when 'ended' then
            select array_agg(q.ended_at), array_agg(q.id), array_agg(q.partition) into v_times, v_ids, v_partitions
            from (select w.ended_at, w.id, w.partition from unnest(p_states) s (state)
                  cross join lateral (select x.ended_at, x.id, x.partition from flowfabric.unsuccessful x
                                      where x.state = s.state and (x.ended_at, x.id, x.partition) < (v_at, v_id, v_partition)
                                      order by x.ended_at desc, x.id desc, x.partition desc limit v_chunk) w
                  order by w.ended_at desc, w.id desc, w.partition desc limit v_chunk) q;
        when 'stopped' then
            select array_agg(q.created_at), array_agg(q.id), array_agg(q.partition) into v_times, v_ids, v_partitions
            from (select b.created_at, b.id, b.partition from flowfabric.blocked b
                  where b.blocking_reason = 'waiting_for_capable_worker'
                    and (b.created_at, b.id, b.partition) < (v_at, v_id, v_partition) and b.created_at >= v_from
                  order by b.created_at desc, b.id desc, b.partition desc limit v_chunk) q;
        when 'parent' then
            select array_agg(q.created_at), array_agg(q.id), array_agg(q.partition) into v_times, v_ids, v_partitions
            from (select e.created_at, e.id, e.partition from flowfabric.execution e
                  where e.parent_id = p_parent and (e.created_at, e.id, e.partition) < (v_at, v_id, v_partition)
                    and e.created_at >= v_from
                  order by e.created_at desc, e.id desc, e.partition desc limit v_chunk) q;
        when 'flow' then
            select array_agg(q.created_at), array_agg(q.id), array_agg(q.partition) into v_times, v_ids, v_partitions
            from (select e.created_at, e.id, e.partition from flowfabric.execution e
                  where e.flow_id = p_flow and (e.created_at, e.id, e.partition) < (v_at, v_id, v_partition)
                    and e.created_at >= v_from
                  order by e.created_at desc, e.id desc, e.partition desc limit v_chunk) q;
        when 'tag' then
            select array_agg(q.created_at), array_agg(q.id), array_agg(q.partition) into v_times, v_ids, v_partitions
            from (select t.created_at, t.id, t.partition from flowfabric.tag t
                  where t.digest = flowfabric.tag_digest(p_tag_key, p_tag_value)
                    and (t.created_at, t.id, t.partition) < (v_at, v_id, v_partition) and t.created_at >= v_from
                  order by t.created_at desc, t.id desc, t.partition desc limit v_chunk) q;
        when 'namespace' then
            select array_agg(q.created_at), array_agg(q.id), array_agg(q.partition) into v_times, v_ids, v_partitions
            from (select e.created_at, e.id, e.partition from flowfabric.execution e
                  where e.namespace = p_namespace and e.namespace <> ''
                    and (e.created_at, e.id, e.partition) < (v_at, v_id, v_partition) and e.created_at >= v_from
                  order by e.created_at desc, e.id desc, e.partition desc limit v_chunk) q;
        when 'state' then
            select array_agg(q.created_at), array_agg(q.id), array_agg(q.partition) into v_times, v_ids, v_partitions
            from flowfabric.find_by_state(p_states, v_rank_routes, v_ranks, v_at, v_id, v_partition, v_from, v_chunk) q;
        else
            select q.times, q.ids, q.partitions into v_times, v_ids, v_partitions
            from flowfabric.find_by_route(v_routes, v_at, v_id, v_partition, v_from, v_chunk) q;
        end case;
        v_n := coalesce(cardinality(v_ids), 0);
        for i in 1 .. v_n loop
            v_at := v_times[i]; v_id := v_ids[i]; v_partition := v_partitions[i];
            -- The filters are here so that the rest of the view is read for matches alone.
            select v.* into v_row from flowfabric.execution_view v
            where v.partition = v_partition and v.id = v_id and (p_namespace is null or v.namespace = p_namespace)
              and (p_lanes is null or v.lane = any (p_lanes)) and (p_kinds is null or v.kind = any (p_kinds))
              and (p_states is null or v.state = any (p_states))
              and (p_tag_key is null or v.tags ->> p_tag_key = p_tag_value)
              and (p_flow is null or v.flow_id = p_flow)
              and (not p_by_end or v.created_at >= v_from and (p_to is null or v.created_at < p_to))
              and (p_parent is null or v.parent_id = p_parent) and (p_stopped is not true or v.stops is not null);
            if found then
                v_found := v_found + 1;
                if v_found > p_limit then
                    return next v_last;
                    return;
                end if;
                v_row.lease_id := null;   -- the right to report; see may_operate
                return next v_row;
            end if;
            v_last.created_at := v_at; v_last.id := v_id; v_last.partition := v_partition;
        end loop;
        exit when v_n < v_chunk;
        v_seen := v_seen + v_n;
        if v_seen >= p_budget then
            return next v_last;
            return;
        end if;
        v_chunk := least(v_chunk * 4, 5000, p_budget - v_seen);
    end loop;
end;
$$;

-- find_by_route: positions of the newest executions of some routes, newest first
--
-- Routes are read in the order of their newest execution, and each only as far as it can still contribute: with a thousand
-- kinds most are not read beyond the first row. Groups of routes share a merge, and double.
create or replace function flowfabric.find_by_route(
    p_routes integer[], p_at timestamptz, p_id uuid, p_partition integer, p_from timestamptz, p_limit integer,
    out times timestamptz[], out ids uuid[], out partitions integer[])
language plpgsql stable as $$
declare
    v_routes integer[];
    v_newest timestamptz[];
    v_first integer := 1;
    v_size integer := 1;
begin
    select array_agg(q.route), array_agg(q.created_at) into v_routes, v_newest
    from (select w.route, n.created_at
          from unnest(p_routes) as w (route)
          cross join lateral (select e.created_at, e.id, e.partition from flowfabric.execution e
                              where e.route = w.route and (e.created_at, e.id, e.partition) < (p_at, p_id, p_partition)
                                and e.created_at >= p_from
                              order by e.created_at desc, e.id desc, e.partition desc limit 1) n
          order by n.created_at desc, n.id desc, n.partition desc limit p_limit) q;
    while v_first <= cardinality(v_routes) loop
        exit when v_newest[v_first] < times[p_limit];
        select array_agg(q.created_at), array_agg(q.id), array_agg(q.partition) into times, ids, partitions
        from (select c.created_at, c.id, c.partition
              from (select * from unnest(times, ids, partitions) as k (created_at, id, partition)
                    union all
                    select w.* from unnest(v_routes[v_first : v_first + v_size - 1]) as u (route)
                    cross join lateral (
                        select e.created_at, e.id, e.partition from flowfabric.execution e
                        where e.route = u.route and (e.created_at, e.id, e.partition) < (p_at, p_id, p_partition)
                          and e.created_at >= coalesce(times[p_limit], p_from)
                        order by e.created_at desc, e.id desc, e.partition desc limit p_limit) w) c
              order by c.created_at desc, c.id desc, c.partition desc limit p_limit) q;
        v_first := v_first + v_size;
        v_size := v_size * 2;
    end loop;
end;
$$;

-- find_by_state: positions from the narrow rows that states leave behind, newest first.
--
-- Takes    the (route, rank) pairs that ready rows have, if the states leave any: within a pair they are in order.
create or replace function flowfabric.find_by_state(
    p_states text[], p_routes integer[], p_ranks integer[], p_at timestamptz, p_id uuid, p_partition integer,
    p_from timestamptz, p_limit integer)
returns table (created_at timestamptz, id uuid, partition integer)
language sql stable as $$
    select c.created_at, c.id, c.partition from (
        -- may be claimed
        (select w.created_at, w.id, w.partition from unnest(p_routes, p_ranks) k (route, rank)
         cross join lateral (select r.created_at, r.id, r.partition from flowfabric.ready r
                             where r.route = k.route and r.rank = k.rank
                               and (r.created_at, r.id, r.partition) < (p_at, p_id, p_partition)
                               and r.created_at >= p_from
                             order by r.created_at desc, r.id desc, r.partition desc limit p_limit) w)
        union
        -- active, but the lease is lost
        (select r.created_at, r.id, r.partition from flowfabric.ready r
         where r.available_at is not null and 'active' = any (p_states)
           and (r.created_at, r.id, r.partition) < (p_at, p_id, p_partition) and r.created_at >= p_from)
        union
        -- held back
        (select w.created_at, w.id, w.partition
         from (values ('waiting', 'waiting_for_capable_worker'), ('waiting', 'paused_by_operator'),
                      ('waiting', 'paused_by_policy'), ('rate_limited', 'waiting_for_budget'),
                      ('rate_limited', 'waiting_for_quota')) s (state, reason)
         cross join lateral (select b.created_at, b.id, b.partition from flowfabric.blocked b
                             where b.blocking_reason = s.reason
                               and (b.created_at, b.id, b.partition) < (p_at, p_id, p_partition)
                               and b.created_at >= p_from
                             order by b.created_at desc, b.id desc, b.partition desc limit p_limit) w
         where s.state = any (p_states))
        union
        -- under a timer
        (select e.created_at, e.id, e.partition
         from flowfabric.timer t cross join lateral unnest(t.partitions, t.ids) as u (partition, id)
         join flowfabric.execution e on e.partition = u.partition and e.id = u.id
         where t.kind in (case when 'active' = any (p_states) then 'lease' end,
                          case when 'delayed' = any (p_states) then 'delay' end)
           and e.state = case t.kind when 'lease' then 'active' else 'delayed' end
           and (e.created_at, e.id, e.partition) < (p_at, p_id, p_partition) and e.created_at >= p_from)
        union
        -- ended otherwise than by success
        (select w.created_at, w.id, w.partition from unnest(p_states) s (state)
         cross join lateral (select x.created_at, x.id, x.partition from flowfabric.unsuccessful x
                             where x.state = s.state and (x.created_at, x.id, x.partition) < (p_at, p_id, p_partition)
                               and x.created_at >= p_from
                             order by x.created_at desc, x.id desc, x.partition desc limit p_limit) w)
    ) c
    order by c.created_at desc, c.id desc, c.partition desc limit p_limit
$$;

-- ready_orders: the (route, rank) pairs that ready rows have, one index probe each; null if there are more than p_most.
create or replace function flowfabric.ready_orders(
    p_routes integer[], p_most integer, out routes integer[], out ranks integer[])
language sql stable as $$
    with recursive pair as (
        select w.route, f.rank from unnest(p_routes) w (route)
        cross join lateral (select r.rank from flowfabric.ready r where r.route = w.route
                            order by r.rank desc, r.created_at desc, r.id desc limit 1) f
        union all
        select p.route, f.rank from pair p
        cross join lateral (select r.rank from flowfabric.ready r where r.route = p.route and r.rank < p.rank
                            order by r.rank desc, r.created_at desc, r.id desc limit 1) f
    ), few as (select p.route, p.rank from pair p limit p_most + 1)
    select case when count(*) <= p_most then coalesce(array_agg(s.route), '{}') end,
           case when count(*) <= p_most then coalesce(array_agg(s.rank), '{}') end
    from few s
$$;

-- has_few_timers: whether the timers of some kinds cover at most p_most executions.
create or replace function flowfabric.has_few_timers(p_kinds text[], p_most integer) returns boolean
language plpgsql stable as $$
declare
    v_size integer;
    v_seen integer := 0;
begin
    for v_size in select cardinality(t.ids) from flowfabric.timer t where t.kind = any (p_kinds) loop
        v_seen := v_seen + v_size;
        if v_seen > p_most then
            return false;
        end if;
    end loop;
    return true;
end;
$$;
