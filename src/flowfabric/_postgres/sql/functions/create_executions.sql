-- create_executions: nothing -> waiting or delayed, for many at once
--
-- Called by submitters, also inside their own transaction.
-- Takes    the distinct routes of the call and, per item, the number of its route (null: all go the first); an array
--          is null where every item has the default, and p_policy may be one for all.
-- Locks    idempotency keys in order, new lanes and routes in order, the ready locks of the routes, shared, then
--          ids that the caller gave, in the order of the items.
-- Answers  one row with ordinal 0 when all were created and wait (partition: how many partitions there are); else
--          one row per item: created, duplicate (with the id that stands), or lane_closed.
create or replace function flowfabric.create_executions(
    p_lanes text[], p_kinds text[], p_capabilities text[],
    p_route_no integer[], p_partition integer[], p_id uuid[], p_id_given boolean,
    p_namespace text[], p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[],
    p_flow uuid[], p_key text[], p_dedup_ms bigint[], p_tags text[], p_policy text[],
    p_budgets text[], p_quota uuid[],
    p_delay_until timestamptz[], p_delay_ms bigint[], p_deadline_at timestamptz[], p_deadline_ms bigint[])
returns table (ordinal integer, code text, partition integer, id uuid, state text)
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_code text[];            -- null while the item may still be created
    v_unfit text[];           -- per item: why it would not be made even if its key were free
    v_found text[];
    v_standing uuid[];        -- per item: the id a duplicate is answered with
    v_routes integer[];
    v_made integer;
begin
    if not p_id_given and cardinality(p_lanes) = 1 and (p_policy is null or cardinality(p_policy) = 1) and num_nonnulls(
           p_namespace, p_creator, p_payload_encoding, p_priority, p_flow, p_key, p_tags, p_budgets, p_quota,
           p_delay_until, p_delay_ms, p_deadline_at, p_deadline_ms) = 0 then
        partition := flowfabric.create_plain(
            p_lanes[1], p_kinds[1], p_capabilities[1], p_partition, p_id, p_payload, p_policy[1]::jsonb);
        if partition is not null then
            ordinal := 0; code := 'created'; state := 'waiting';
            return next;
            return;
        end if;
    end if;

    if p_key is not null then
        v_now := flowfabric.now();
        if cardinality(p_key) > 1 then
            select array_agg(case when e.id is not null then 'exists'
                                  when l.state in ('draining', 'disabled') then 'lane_closed' end order by u.ord)
            into v_unfit
            from unnest(p_partition, p_id, p_route_no) with ordinality as u (partition, id, no, ord)
            left join flowfabric.execution e on p_id_given and e.partition = u.partition and e.id = u.id
            left join flowfabric.lane l on l.name = p_lanes[coalesce(u.no, 1)];
        end if;
        -- Of equal keys inside the call the first with a window wins and those behind it are its duplicates; a key
        -- without a window never matches, so that all before the winner are made too. What would not be made anyway
        -- takes no key from those behind it.
        with item as (
            select u.*, min(u.ord) filter (where v_unfit[u.ord] is null and u.dedup > 0) over w is not null as windowed,
                   coalesce(min(u.ord) filter (where v_unfit[u.ord] is null and u.dedup > 0) over w,
                            max(u.ord) filter (where v_unfit[u.ord] is null) over w) as first_ord
            from (select k.partition, coalesce(k.flow, '00000000-0000-0000-0000-000000000000'::uuid) as scope,
                         coalesce(k.namespace, '') as namespace, k.key, k.id, coalesce(k.dedup, 86400000) as dedup, k.ord::integer as ord
                  from unnest(p_partition, p_flow, p_namespace, p_key, p_id, p_dedup_ms)
                       with ordinality as k (partition, flow, namespace, key, id, dedup, ord)
                  where k.key is not null) u
            window w as (partition by u.partition, u.scope, u.namespace, u.key order by u.ord
                         rows between unbounded preceding and unbounded following)
        ), won as (
            insert into flowfabric.idempotency as i (partition, scope, namespace, key, id, expires_at)
            -- Without a window it is over for every call, also for one that began earlier and waited.
            select t.partition, t.scope, t.namespace, t.key, t.id,
                   case when t.dedup > 0 then v_now + flowfabric.ms(t.dedup) else '-infinity' end
            from item t where t.ord = t.first_ord
            order by t.partition, t.scope, t.namespace, t.key
            on conflict (partition, scope, namespace, key) do update
                set id = excluded.id, expires_at = excluded.expires_at
                where i.expires_at <= v_now
            returning i.partition, i.scope, i.namespace, i.key
        )
        select array_agg(case when t.ord is null then null
                              when t.first_ord is null then case when i.key is not null then 'duplicate' end
                              when w.key is null then 'duplicate'
                              when t.ord > t.first_ord and t.windowed then 'duplicate' end order by o.ord)
        into v_code
        from generate_series(1, cardinality(p_id)) o (ord)
        left join item t on t.ord = o.ord
        left join won w on w.partition = t.partition and w.scope = t.scope and w.namespace = t.namespace and w.key = t.key
        left join flowfabric.idempotency i on t.first_ord is null and i.partition = t.partition and i.scope = t.scope
             and i.namespace = t.namespace and i.key = t.key and i.expires_at > v_now;
        -- A new statement sees what the winner of a race has committed meanwhile.
        if array_position(v_code, 'duplicate') is not null then
            select array_agg(case when v_code[u.ord] is not null then i.id end order by u.ord) into v_standing
            from unnest(p_partition, p_flow, p_namespace, p_key)
                 with ordinality as u (partition, flow, namespace, key, ord)
            left join flowfabric.idempotency i on i.partition = u.partition
                 and i.scope = coalesce(u.flow, '00000000-0000-0000-0000-000000000000'::uuid)
                 and i.namespace = coalesce(u.namespace, '') and i.key = u.key;
        end if;
    end if;

    if p_id_given then
        select array_agg(case when v_code[u.ord] is not null then v_code[u.ord]
                              when e.id is not null or u.nth > 1 then 'exists' end order by u.ord)
        into v_code
        from (select i.*, row_number() over (partition by i.partition, i.id, v_code[i.ord] order by i.ord) as nth
              from unnest(p_partition, p_id) with ordinality as i (partition, id, ord)) u
        left join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
    end if;

    v_now := coalesce(v_now, flowfabric.now());
    if v_code is null or array_position(v_code, null) is not null then
        if v_code is not null then
            -- A duplicate registers nothing: forget the routes that only duplicates use.
            select array_agg(case when exists (select from unnest(p_route_no, v_code) i (no, code)
                                               where coalesce(i.no, 1) = l.no and i.code is null) then l.lane end order by l.no)
            into p_lanes from unnest(p_lanes) with ordinality as l (lane, no);
        end if;
        v_routes := flowfabric.resolve_routes(p_lanes, p_kinds, p_capabilities, v_now);
        if array_position(v_routes, null) is not null then
            select array_agg(coalesce(v_code[u.ord], case when v_routes[coalesce(u.no, 1)] is null then 'lane_closed' end)
                             order by u.ord)
            into v_code from unnest(p_id, p_route_no) with ordinality as u (id, no, ord);
        end if;
        if cardinality(v_routes) = 1 and v_routes[1] is not null then
            perform pg_advisory_xact_lock_shared(708301, v_routes[1]);   -- as hold_routes does, without the call
        else
            perform flowfabric.hold_routes(array_remove(v_routes, null));
        end if;

        while v_made is null loop
            if not p_id_given then
                v_made := flowfabric.insert_executions(
                    v_routes, v_code, p_route_no, p_partition, p_id, p_namespace, p_creator, p_payload,
                    p_payload_encoding, p_priority, null, p_key, p_tags, p_policy, p_budgets, p_quota, p_delay_until,
                    p_delay_ms, p_deadline_at, p_deadline_ms, v_now, null, null);
                exit;
            end if;
            begin
                v_made := flowfabric.insert_executions(
                    v_routes, v_code, p_route_no, p_partition, p_id, p_namespace, p_creator, p_payload,
                    p_payload_encoding, p_priority, null, p_key, p_tags, p_policy, p_budgets, p_quota, p_delay_until,
                    p_delay_ms, p_deadline_at, p_deadline_ms, v_now, null, null);
            exception when unique_violation then
                -- Somebody was quicker with an id that was given; ids of our own making never meet.
                select array_agg(coalesce(v_code[u.ord], case when e.id is not null then 'exists' end) order by u.ord)
                into v_found
                from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
                left join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
                if v_found is not distinct from v_code then
                    raise exception 'an execution id was taken by a transaction this one cannot see'
                        using errcode = 'serialization_failure';
                end if;
                v_code := v_found;
            end;
        end loop;

        perform flowfabric.settle_new(
            v_routes, v_code, p_route_no, p_partition, p_id, p_priority, p_tags,
            p_delay_until is not null or p_delay_ms is not null,
            p_deadline_at is not null or p_deadline_ms is not null, v_made, v_now);
    end if;

    -- A key taken above for an item that was not made is given back.
    if p_key is not null and v_code && array['exists', 'lane_closed'] then
        delete from flowfabric.idempotency i
        using unnest(p_partition, p_flow, p_namespace, p_key, p_id) with ordinality
              as u (partition, flow, namespace, key, id, ord)
        where v_code[u.ord] in ('exists', 'lane_closed') and i.partition = u.partition and i.namespace = coalesce(u.namespace, '')
          and i.key = u.key and i.id = u.id and i.expires_at > v_now
          and i.scope = coalesce(u.flow, '00000000-0000-0000-0000-000000000000'::uuid);
    end if;

    if v_code is null and p_delay_until is null and p_delay_ms is null then
        return query select 0, 'created', d.flow_partitions, null::uuid, 'waiting' from flowfabric.deployment d;
    else
        return query
        select u.ord::integer,
               case when v_code[u.ord] = 'lane_closed' then 'lane_closed'
                    when v_code[u.ord] is null then 'created' else 'duplicate' end,
               u.partition, coalesce(v_standing[u.ord], u.id), e.state
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        order by u.ord;
    end if;
end;
$$;

-- create_plain: executions of one route with nothing but a payload and one policy
--
-- The most common call, in as few statements as can be: a cold processor pays for every one of them.
-- Answers  how many partitions there are; null when the route is new or closed, and then nothing was made.
create or replace function flowfabric.create_plain(
    p_lane text, p_kind text, p_capabilities text, p_partition integer[], p_id uuid[], p_payload bytea[], p_policy jsonb)
returns integer
language plpgsql as $$
declare
    v_now timestamptz;
    v_partitions integer;
    v_route integer;
    v_outranks boolean;
    v_wakes boolean;
begin
    select flowfabric.now(), d.flow_partitions, r.id into v_now, v_partitions, v_route
    from flowfabric.deployment d, flowfabric.route r, flowfabric.lane l
    where r.lane = p_lane and r.kind = p_kind and r.digest = md5(p_capabilities)
      and l.name = p_lane and l.state in ('active', 'paused');
    if not found then
        return null;
    end if;
    perform pg_advisory_xact_lock_shared(708301, v_route);   -- as hold_routes does, without the call
    with made as (
        insert into flowfabric.execution
            (partition, id, route, created_at, namespace, creator, payload, policy, state, blocking_reason, pending,
             priority, transitioned_at, mutated_at)
        select u.partition, u.id, v_route, v_now, '', '', u.payload, p_policy, 'waiting', 'waiting_for_worker', 'first',
               0, v_now, v_now
        from unnest(p_partition, p_id, p_payload) as u (partition, id, payload)
    )
    insert into flowfabric.ready (route, rank, created_at, id, partition)
    select v_route, 9000, v_now, u.id, u.partition from unnest(p_partition, p_id) as u (partition, id);
    select exists (select from flowfabric.ready_floor f
                   where f.route = v_route and (f.rank, f.created_at) >= (9000, v_now)),
           exists (select from flowfabric.sleeper s where s.topic = 'work' and s.until > clock_timestamp())
    into v_outranks, v_wakes;
    if v_outranks or current_setting('transaction_isolation') <> 'read committed' then
        perform flowfabric.lower_floor(array_agg(v_route), array_agg(9000), array_agg(v_now), array_agg(i))
        from unnest(p_id) i;
    end if;
    if v_wakes then
        perform pg_notify('flowfabric', 'work');
    end if;
    return v_partitions;
end;
$$;

-- settle_new: what belongs to new executions beside their rows: floors, a wake-up, timers, tags.
--
-- p_code: items with one were not made. p_ready: how many may be claimed at once.
create or replace function flowfabric.settle_new(
    p_routes integer[], p_code text[], p_route_no integer[], p_partition integer[], p_id uuid[], p_priority integer[],
    p_tags text[], p_delays boolean, p_deadlines boolean, p_ready integer, p_now timestamptz)
returns void
language plpgsql as $$
declare
    v_rank integer := 9000;
begin
    if p_ready > 0 then
        -- Rows created now lie behind every floor, unless they outrank it.
        if p_priority is not null then
            select 9000 - least(greatest(max(p), 0), 9000) into v_rank from unnest(p_priority) p;
        end if;
        if current_setting('transaction_isolation') <> 'read committed'
           or exists (select from flowfabric.ready_floor f
                      where f.route = any (p_routes) and (f.rank, f.created_at) >= (v_rank, p_now)) then
            perform flowfabric.lower_floor(
                array_agg(p_routes[coalesce(u.no, 1)]), array_agg(9000 - least(greatest(coalesce(u.priority, 0), 0), 9000)),
                array_agg(p_now), array_agg(u.id))
            from unnest(p_route_no, p_priority, p_id) with ordinality as u (no, priority, id, ord)
            where p_code is null or p_code[u.ord] is null;
        end if;
        perform flowfabric.wake_workers();
    end if;
    if p_delays then
        perform flowfabric.set_timers('delay', array_agg(e.partition), array_agg(e.id), array_agg(e.delay_until))
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state = 'delayed'
        where p_code is null or p_code[u.ord] is null;
    end if;
    if p_deadlines then
        perform flowfabric.set_timers('deadline', array_agg(e.partition), array_agg(e.id), array_agg(e.deadline_at))
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.deadline_at is not null
        where p_code is null or p_code[u.ord] is null;
    end if;
    if p_tags is not null then
        insert into flowfabric.tag (digest, created_at, id, partition)
        select flowfabric.tag_digest(t.key, t.value), p_now, u.id, u.partition
        from unnest(p_partition, p_id, p_tags) with ordinality as u (partition, id, tags, ord)
        cross join lateral jsonb_each_text(u.tags::jsonb) as t (key, value)
        where u.tags is not null and (p_code is null or p_code[u.ord] is null);
    end if;
end;
$$;

-- insert_executions: the rows of new executions and their ready rows; answers how many may be claimed at once.
--
-- Unnests only what every item has: each further array would cost every row. p_deps: how many edges lead to each.
create or replace function flowfabric.insert_executions(
    p_routes integer[], p_code text[], p_route_no integer[], p_partition integer[], p_id uuid[], p_namespace text[],
    p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[], p_flow uuid[], p_key text[],
    p_tags text[], p_policy text[], p_budgets text[], p_quota uuid[], p_delay_until timestamptz[], p_delay_ms bigint[],
    p_deadline_at timestamptz[], p_deadline_ms bigint[], p_now timestamptz, p_node text[], p_deps integer[])
returns integer
language plpgsql as $$
declare
    v_ready integer;
    v_policy jsonb := case when cardinality(p_policy) = 1 then p_policy[1]::jsonb end;
begin
    with made as (
        insert into flowfabric.execution
            (partition, id, route, created_at, namespace, creator, flow_id, idempotency_key, payload, payload_encoding,
             policy, budget_ids, quota_policy_id, state, blocking_reason, blocking_detail, pending, priority, tags,
             delay_until, deadline_at, transitioned_at, mutated_at, node)
        select u.partition, u.id, p_routes[coalesce(p_route_no[u.ord], 1)], p_now, coalesce(p_namespace[u.ord], ''),
               coalesce(p_creator[u.ord], ''), p_flow[u.ord], p_key[u.ord], u.payload, p_payload_encoding[u.ord],
               coalesce(v_policy, p_policy[u.ord]::jsonb), string_to_array(p_budgets[u.ord], ',')::uuid[], p_quota[u.ord],
               case when p_deps[u.ord] > 0 then 'waiting_children' when d.until is null then 'waiting' else 'delayed' end,
               case when p_deps[u.ord] > 0 then 'waiting_for_children'
                    when d.until is null then 'waiting_for_worker' else 'waiting_for_delay' end,
               case when p_deps[u.ord] > 0 then p_deps[u.ord] || ' dep(s) unresolved'
                    when d.until is not null
                    then 'delayed until ' || to_char(d.until at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') end,
               'first', least(greatest(coalesce(p_priority[u.ord], 0), 0), 9000), p_tags[u.ord]::jsonb, d.until,
               coalesce(p_deadline_at[u.ord], p_now + flowfabric.ms(p_deadline_ms[u.ord])), p_now, p_now, p_node[u.ord]
        from unnest(p_partition, p_id, p_payload) with ordinality as u (partition, id, payload, ord)
        cross join lateral (
            select case when w.at > p_now then w.at end as until
            from (select coalesce(p_delay_until[u.ord], p_now + flowfabric.ms(p_delay_ms[u.ord])) as at) w) d
        where p_code is null or p_code[u.ord] is null
        returning partition, id, route, priority, created_at, state, deadline_at
    )
    insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at)
    select m.route, 9000 - m.priority, m.created_at, m.id, m.partition, m.deadline_at
    from made m where m.state = 'waiting';
    get diagnostics v_ready = row_count;
    return v_ready;
end;
$$;

-- standing_executions: what an item that may not be created would be answered before its policy is judged
--
-- Answers  one row per item: duplicate (with the id that stands), lane_closed, or free.
create or replace function flowfabric.standing_executions(
    p_partition integer[], p_id uuid[], p_namespace text[], p_key text[], p_flow uuid[], p_lane text[])
returns table (ordinal integer, code text, partition integer, id uuid)
language sql volatile security definer set search_path = flowfabric, pg_temp as $$
    select u.ord::integer,
           case when i.id is not null or e.id is not null then 'duplicate'
                when l.state in ('draining', 'disabled') then 'lane_closed' else 'free' end,
           u.partition, coalesce(i.id, u.id)
    from unnest(p_partition, p_id, p_namespace, p_key, p_flow, p_lane) with ordinality
         as u (partition, id, namespace, key, flow, lane, ord)
    left join flowfabric.idempotency i on i.partition = u.partition and i.namespace = coalesce(u.namespace, '') and i.key = u.key
         and i.scope = coalesce(u.flow, '00000000-0000-0000-0000-000000000000'::uuid)
         and i.expires_at > flowfabric.now()
    left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    left join flowfabric.lane l on l.name = u.lane
    order by u.ord
$$;

-- tag_digest: of the pair; the length keeps ('a', 'bc') and ('ab', 'c') apart.
create or replace function flowfabric.tag_digest(p_key text, p_value text) returns bigint
language sql immutable as $$ select hashtextextended(length(p_key) || ':' || p_key || p_value, 7083) $$;
