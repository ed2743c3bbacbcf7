-- create_executions: nothing -> waiting or delayed, for many at once
--
-- Called by submitters, also inside their own transaction.
-- Takes    the distinct routes of the call and, per item, the number of its route (null: all go the
--          first); an array is null
--          where every item has the default.
-- Locks    idempotency keys in order, then the ready locks of the routes, shared.
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
    v_n integer := cardinality(p_id);
    v_code text[];            -- null while the item may still be created
    v_standing uuid[];        -- per item: the id a duplicate is answered with
    v_routes integer[];
    v_made integer;
    v_rank integer;
begin
    if p_key is not null then
        v_now := flowfabric.now();
        -- Of equal keys inside the call the first with a window wins and those behind it are its duplicates; a key
        -- without a window never matches, so that all before the winner are made too.
        with item as (
            select u.*, coalesce(min(u.ord) filter (where u.dedup > 0) over w, max(u.ord) over w) as first_ord
            from (select k.partition, coalesce(k.flow, '00000000-0000-0000-0000-000000000000'::uuid) as scope,
                         coalesce(k.namespace, '') as namespace, k.key, k.id, coalesce(k.dedup, 86400000) as dedup, k.ord::integer as ord
                  from unnest(p_partition, p_flow, p_namespace, p_key, p_id, p_dedup_ms)
                       with ordinality as k (partition, flow, namespace, key, id, dedup, ord)
                  where k.key is not null) u
            window w as (partition by u.partition, u.scope, u.namespace, u.key order by u.ord
                         rows between unbounded preceding and unbounded following)
        ), won as (
            insert into flowfabric.idempotency as i (partition, scope, namespace, key, id, expires_at)
            select t.partition, t.scope, t.namespace, t.key, t.id, v_now + flowfabric.ms(t.dedup)
            from item t where t.ord = t.first_ord
            order by t.partition, t.scope, t.namespace, t.key
            on conflict (partition, scope, namespace, key) do update
                set id = excluded.id, expires_at = excluded.expires_at
                where i.expires_at <= v_now
            returning i.partition, i.scope, i.namespace, i.key
        )
        select array_agg(case when t.ord is null then null
                              when w.key is null then 'duplicate'
                              when t.ord > t.first_ord then 'duplicate' end order by o.ord)
        into v_code
        from generate_series(1, v_n) o (ord)
        left join item t on t.ord = o.ord
        left join won w on w.partition = t.partition and w.scope = t.scope and w.namespace = t.namespace and w.key = t.key;
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
        from (select i.*, row_number() over (partition by i.partition, i.id order by i.ord) as nth
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
        perform flowfabric.hold_routes(array_remove(v_routes, null));

        with made as (
            insert into flowfabric.execution
                (partition, id, route, created_at, namespace, creator, flow_id, idempotency_key, payload,
                 payload_encoding, policy, budget_ids, quota_policy_id, state, blocking_reason, blocking_detail,
                 pending, priority, tags, delay_until, deadline_at, transitioned_at, mutated_at)
            select u.partition, u.id, v_routes[coalesce(u.no, 1)], v_now, coalesce(u.namespace, ''), coalesce(u.creator, ''), u.flow, u.key, u.payload,
                   u.encoding, u.policy::jsonb, string_to_array(u.budgets, ',')::uuid[], u.quota,
                   case when d.until is null then 'waiting' else 'delayed' end,
                   case when d.until is null then 'waiting_for_worker' else 'waiting_for_delay' end,
                   case when d.until is not null
                        then 'delayed until ' || to_char(d.until at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') end,
                   'first', least(greatest(coalesce(u.priority, 0), 0), 9000), u.tags::jsonb, d.until,
                   coalesce(u.deadline_at, v_now + flowfabric.ms(u.deadline_ms)), v_now, v_now
            from unnest(p_route_no, p_partition, p_id, p_namespace, p_creator, p_payload, p_payload_encoding,
                        p_priority, p_flow, p_key, p_tags, p_policy, p_budgets, p_quota, p_delay_until, p_delay_ms,
                        p_deadline_at, p_deadline_ms) with ordinality
                 as u (no, partition, id, namespace, creator, payload, encoding, priority, flow, key, tags, policy,
                       budgets, quota, delay_until, delay_ms, deadline_at, deadline_ms, ord)
            cross join lateral (
                select case when w.at > v_now then w.at end as until
                from (select coalesce(u.delay_until, v_now + flowfabric.ms(u.delay_ms)) as at) w) d
            where v_code is null or v_code[u.ord] is null
            on conflict (partition, id) do nothing
            returning partition, id, route, priority, created_at, state, deadline_at
        )
        insert into flowfabric.ready (route, rank, created_at, id, partition, deadline_at)
        select m.route, 9000 - m.priority, m.created_at, m.id, m.partition, m.deadline_at
        from made m where m.state = 'waiting';
        get diagnostics v_made = row_count;

        if v_made < v_n then
            -- Delays and refusals: find out what was really made before anything else is written for it.
            select array_agg(coalesce(v_code[u.ord], case when e.id is null or e.created_at <> v_now then 'exists' end)
                             order by u.ord)
            into v_code
            from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
            left join flowfabric.execution e on e.partition = u.partition and e.id = u.id;
        end if;

        if v_made > 0 then
            -- Rows created now lie behind every floor, unless they outrank it.
            select 9000 - least(greatest(coalesce(max(p), 0), 0), 9000) into v_rank from unnest(p_priority) p;
            if current_setting('transaction_isolation') <> 'read committed'
               or exists (select from flowfabric.ready_floor f
                          where f.route = any (v_routes) and (f.rank, f.created_at) >= (v_rank, v_now)) then
                perform flowfabric.lower_floor(
                    array_agg(v_routes[coalesce(u.no, 1)]), array_agg(9000 - least(greatest(coalesce(u.priority, 0), 0), 9000)),
                    array_agg(v_now), array_agg(u.id))
                from unnest(p_route_no, p_priority, p_id) with ordinality as u (no, priority, id, ord)
                where v_code is null or v_code[u.ord] is null;
            end if;
            perform flowfabric.wake_workers();
        end if;
        if p_delay_until is not null or p_delay_ms is not null then
            perform flowfabric.set_timers('delay', array_agg(e.partition), array_agg(e.id), array_agg(e.delay_until))
            from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
            join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state = 'delayed'
            where v_code is null or v_code[u.ord] is null;
        end if;
        if p_deadline_at is not null or p_deadline_ms is not null then
            perform flowfabric.set_timers('deadline', array_agg(e.partition), array_agg(e.id), array_agg(e.deadline_at))
            from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
            join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.deadline_at is not null
            where v_code is null or v_code[u.ord] is null;
        end if;
        if p_tags is not null then
            insert into flowfabric.tag (digest, created_at, id, partition)
            select flowfabric.tag_digest(t.key, t.value), v_now, u.id, u.partition
            from unnest(p_partition, p_id, p_tags) with ordinality as u (partition, id, tags, ord)
            cross join lateral jsonb_each_text(u.tags::jsonb) as t (key, value)
            where u.tags is not null and (v_code is null or v_code[u.ord] is null);
        end if;
    end if;

    -- A key taken above for an item that was not made is given back.
    if p_key is not null and v_code && array['exists', 'lane_closed'] then
        delete from flowfabric.idempotency i
        using unnest(p_partition, p_flow, p_namespace, p_key, p_id) with ordinality
              as u (partition, flow, namespace, key, id, ord)
        where v_code[u.ord] in ('exists', 'lane_closed') and i.partition = u.partition and i.namespace = coalesce(u.namespace, '')
          and i.key = u.key and i.id = u.id and i.expires_at > v_now
          and i.scope = coalesce(u.flow, '00000000-0000-0000-0000-000000000000'::uuid)
          and not exists (select from flowfabric.execution e
                          where e.partition = i.partition and e.id = i.id and e.idempotency_key = u.key);
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
