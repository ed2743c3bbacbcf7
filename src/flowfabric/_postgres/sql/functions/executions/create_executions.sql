-- create_executions: nothing -> waiting or delayed, for many in one call
--
-- Called by submitters, also inside their own transaction.
-- Takes    the distinct routes of the call and, per item, the number of its route (null: all use the first); an array
--          is null if every item has the default, and p_policy and p_creator may be one for all.
-- Locks    idempotency keys in order, new lanes and routes in order, then ids that the caller gave, in the order of the
--          items.
-- Returns  one row with ordinal 0 when all were created and wait; else one row per item: created, duplicate (with the
--          id that exists), or lane_closed.
-- Roles    submit, work, operate
create or replace function flowfabric.create_executions(
    p_lanes text[], p_kinds text[], p_capabilities text[],
    p_route_no integer[], p_partition integer[], p_id uuid[], p_id_given boolean,
    p_namespace text[], p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[],
    p_flow uuid[], p_key text[], p_dedup_ms bigint[], p_tags text[], p_policy text[],
    p_budgets text[], p_quotas text[],
    p_delay_until timestamptz[], p_delay_ms bigint[], p_deadline_at timestamptz[], p_deadline_ms bigint[])
returns table (ordinal integer, code text, id uuid, state text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_code text[];            -- null while the item may still be created
    v_unfit text[];           -- per item: why it would not be created even if its key were free
    v_standing uuid[];        -- per item: the existing id of a duplicate
    v_routes integer[];
    v_limits bigint[];        -- per item: its limit set; null: no item has one
    v_limited boolean[];
    v_made integer;
begin
    if not p_id_given and cardinality(p_lanes) = 1 and (p_policy is null or cardinality(p_policy) = 1) and num_nonnulls(
           p_namespace, p_payload_encoding, p_priority, p_flow, p_key, p_tags, p_budgets, p_quotas,
           p_delay_until, p_delay_ms, p_deadline_at, p_deadline_ms) = 0 then
        if flowfabric.create_plain(
               p_lanes[1], p_kinds[1], p_capabilities[1], p_partition, p_id, p_payload, p_policy[1]::json,
               p_creator) then
            ordinal := 0; code := 'created'; state := 'waiting';
            return next;
            return;
        end if;
    end if;
    if cardinality(p_creator) < cardinality(p_id) then
        p_creator := array_fill(p_creator[1], array[cardinality(p_id)]);
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
        select k.code, k.standing into v_code, v_standing
        from flowfabric.take_keys(p_flow, p_namespace, p_key, p_id, p_dedup_ms, v_unfit, v_now) k;
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
        select b.p_budgets, b.p_quotas into p_budgets, p_quotas
        from flowfabric.bind_items(
            cardinality(p_id), p_lanes, p_kinds, p_route_no, p_namespace, p_tags, null, p_budgets, p_quotas) b;
        if num_nonnulls(p_budgets, p_quotas) > 0 then
            p_budgets := flowfabric.own_budgets(p_budgets, p_id);
            v_limits := flowfabric.intern_items(p_budgets, p_quotas, p_tags, v_code);
            select s.lanes, s.kinds, s.capabilities, s.limited, s.route_no
            into p_lanes, p_kinds, p_capabilities, v_limited, p_route_no
            from flowfabric.split_routes(p_lanes, p_kinds, p_capabilities, p_route_no, v_limits) s;
        end if;
        if v_code is not null then
            -- A duplicate registers nothing: forget the routes that only duplicates use.
            select array_agg(case when exists (select from unnest(p_route_no, v_code) i (no, code)
                                               where coalesce(i.no, 1) = l.no and i.code is null) then l.lane end order by l.no)
            into p_lanes from unnest(p_lanes) with ordinality as l (lane, no);
        end if;
        v_routes := flowfabric.resolve_routes(p_lanes, p_kinds, p_capabilities, v_limited, v_now);
        if array_position(v_routes, null) is not null then
            select array_agg(coalesce(v_code[u.ord], case when v_routes[coalesce(u.no, 1)] is null then 'lane_closed' end)
                             order by u.ord)
            into v_code from unnest(p_id, p_route_no) with ordinality as u (id, no, ord);
        end if;
        if p_id_given then
            select g.made, g.code into v_made, v_code from flowfabric.insert_given(
                v_routes, v_code, p_route_no, p_partition, p_id, p_namespace, p_creator, p_payload, p_payload_encoding,
                p_priority, p_key, p_tags, p_policy, v_limits, p_delay_until, p_delay_ms, p_deadline_at,
                p_deadline_ms, v_now) g;
        else
            v_made := flowfabric.insert_executions(
                v_routes, v_code, p_route_no, p_partition, p_id, p_namespace, p_creator, p_payload, p_payload_encoding,
                p_priority, null, p_key, p_tags, p_policy, v_limits, p_delay_until, p_delay_ms, p_deadline_at,
                p_deadline_ms, v_now, null, null, null);
        end if;
        perform flowfabric.settle_new(
            v_routes, v_code, p_route_no, p_partition, p_id, p_priority, p_tags,
            p_delay_until is not null or p_delay_ms is not null,
            p_deadline_at is not null or p_deadline_ms is not null, v_made, v_now);
    end if;

    if p_key is not null and v_code && array['exists', 'lane_closed'] then
        perform flowfabric.give_back_keys(p_flow, p_namespace, p_key, p_id, v_code, v_now);
    end if;

    if v_code is null and p_delay_until is null and p_delay_ms is null then
        return query select 0, 'created', null::uuid, 'waiting';
    else
        return query
        select u.ord::integer,
               case when v_code[u.ord] = 'lane_closed' then 'lane_closed'
                    when v_code[u.ord] is null then 'created' else 'duplicate' end,
               coalesce(v_standing[u.ord], u.id), e.state
        from unnest(p_partition, p_id) with ordinality as u (partition, id, ord)
        left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
        order by u.ord;
    end if;
end;
$$;
