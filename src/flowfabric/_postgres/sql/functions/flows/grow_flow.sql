-- grow_flow: create a whole graph, or add to one: executions, edges into them, and how they join
--
-- Called with a checked graph: edges point only at new executions, and contain no cycle.
-- Takes    p_new: the flow is created here. p_from: per edge the number of a new execution, or minus the number of an
--          existing one in p_old; p_to: the number of a new one. p_deps: per new execution its edges (null: none has any).
-- Refuses  a join that cancels existing executions, unless the user may cancel them directly.
-- Locks    the flow, then the existing executions, by id.
-- Returns  one row: ok, exists (the flow, or these executions, were created before) or why not, with an index.
-- Roles    submit, work, operate
create or replace function flowfabric.grow_flow(
    p_partition integer, p_flow uuid, p_new boolean, p_kind text, p_flow_namespace text, p_flow_tags text,
    p_lanes text[], p_kinds text[], p_capabilities text[], p_route_no integer[], p_id uuid[], p_node text[],
    p_namespace text[], p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[],
    p_tags text[], p_policy text[], p_budgets text[], p_quotas text[],
    p_delay_until timestamptz[], p_delay_ms bigint[], p_deadline_at timestamptz[], p_deadline_ms bigint[],
    p_old uuid[], p_edge uuid[], p_from integer[], p_to integer[], p_ref text[], p_passes boolean[], p_deps integer[],
    p_join_of integer[], p_join_policy text[], p_join_k integer[], p_join_cancel boolean[])
returns table (code text, place integer, revision bigint)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_routes integer[];
    v_limits bigint[]; v_limited boolean[];
    v_partitions integer[] := array_fill(p_partition, array[cardinality(p_id)]);
    v_flows uuid[] := array_fill(p_flow, array[cardinality(p_id)]);
    v_edges uuid[]; v_downstreams uuid[]; v_outcomes text[];
    v_made integer := 0;
    v_high integer;
    v_own boolean;
begin
    -- Positions count from one; an array of another shape would be read differently than it was checked.
    if exists (select from unnest(p_from, p_to) as u (f, t) where u.f = 0 or u.t <= 0)
       or array_lower(p_old, 1) <> 1 or array_lower(p_id, 1) <> 1 or array_ndims(p_old) <> 1 or array_ndims(p_id) <> 1 then
        raise exception 'positions and arrays begin with one' using errcode = 'invalid_parameter_value';
    end if;
    if cardinality(p_old) > 0 then
        perform flowfabric.require_read_committed();
        if true = any (p_join_cancel) and not flowfabric.may_operate() and exists (
               select from unnest(p_from, p_to) as u (f, t)
               join unnest(p_join_of, p_join_cancel) as j (of, cancel) on j.of = u.t where u.f < 0 and j.cancel) then
            raise exception 'permission denied for function cancel_as_operator: the join cancels executions that exist'
            using errcode = 'insufficient_privilege';
        end if;
    end if;
    v_now := flowfabric.now();
    if p_new then
        insert into flowfabric.flow
            (partition, flow_id, flow_kind, namespace, tags, node_count, edge_count, created_at, last_mutation_at)
        values (p_partition, p_flow, p_kind, p_flow_namespace, coalesce(p_flow_tags::jsonb, '{}'), cardinality(p_id),
                cardinality(p_edge), v_now, v_now)
        on conflict do nothing;
        code := case when not found then 'exists' end;
    else
        code := flowfabric.open_flow(p_partition, p_flow, true);
    end if;
    if code is null and not p_new then
        -- All of them exist here: a repeated call. Only some, or elsewhere: a conflict.
        select case when count(*) = cardinality(p_id) and bool_and(e.flow_id = p_flow) then 'exists'
                    when count(*) > 0 then 'execution_already_in_flow' end, min(u.ord)::integer into code, place
        from unnest(p_id) with ordinality as u (id, ord)
        cross join lateral (select x.* from flowfabric.execution x where x.partition = p_partition and x.id = u.id offset 0) e;
    end if;
    if code is null and cardinality(p_old) > 0 then
        perform flowfabric.lock_members(p_partition, p_old);
        select 'execution_not_in_flow', u.ord::integer into code, place
        from unnest(p_old) with ordinality as u (id, ord)
        left join lateral (select x.* from flowfabric.execution x
                           where x.partition = p_partition and x.id = u.id and x.flow_id = p_flow offset 0) e on true
        where e.id is null order by u.ord limit 1;
    end if;
    if code is null then
        -- The budget of the flow itself: the policy of the first node defines it, and all members have it.
        v_own := p_new and p_policy[1] like '%"flow_budget"%' and jsonb_typeof(p_policy[1]::jsonb -> 'flow_budget') = 'object';
        if v_own or not p_new and exists (select from flowfabric.budget b where b.id = p_flow) then
            select array_agg(concat_ws(',', p_budgets[n], p_flow::text) order by n) into p_budgets
            from generate_series(1, cardinality(p_id)) as n;
        end if;
        select b.p_budgets, b.p_quotas into p_budgets, p_quotas
        from flowfabric.bind_items(
            cardinality(p_id), p_lanes, p_kinds, p_route_no, p_namespace, p_tags,
            case when p_new then p_kind else (select f.flow_kind from flowfabric.flow f
                                              where f.partition = p_partition and f.flow_id = p_flow) end,
            p_budgets, p_quotas) b;
        if num_nonnulls(p_budgets, p_quotas) > 0 then
            p_budgets := flowfabric.own_budgets(p_budgets, p_id);
            v_limits := flowfabric.intern_items(p_budgets, p_quotas, p_tags, null);
            select s.lanes, s.kinds, s.capabilities, s.limited, s.route_no
            into p_lanes, p_kinds, p_capabilities, v_limited, p_route_no
            from flowfabric.split_routes(p_lanes, p_kinds, p_capabilities, p_route_no, v_limits) s;
        end if;
        v_routes := flowfabric.resolve_routes(p_lanes, p_kinds, p_capabilities, v_limited, v_now);
        if array_position(v_routes, null) is not null then
            select 'lane_closed', min(u.ord)::integer into code, place
            from unnest(p_route_no) with ordinality as u (no, ord) where v_routes[u.no] is null;
        end if;
    end if;
    if code is null then
        v_now := flowfabric.now();
        begin
            if v_own then
                perform flowfabric.create_owned(
                    array[p_partition], array[p_flow], null,
                    array[jsonb_build_object('budget', p_policy[1]::jsonb -> 'flow_budget')::text], v_now);
            end if;
            -- In slices: to find the n-th text of an array takes n steps.
            for v_low in 1 .. cardinality(p_id) by 500 loop
                v_high := v_low + 499;
                v_made := v_made + flowfabric.insert_executions(
                    v_routes, null, p_route_no[v_low:v_high], v_partitions[v_low:v_high], p_id[v_low:v_high],
                    p_namespace[v_low:v_high], p_creator[v_low:v_high], p_payload[v_low:v_high],
                    p_payload_encoding[v_low:v_high], p_priority[v_low:v_high], v_flows[v_low:v_high], null,
                    p_tags[v_low:v_high], case when cardinality(p_policy) = 1 then p_policy else p_policy[v_low:v_high] end,
                    v_limits[v_low:v_high], p_delay_until[v_low:v_high], p_delay_ms[v_low:v_high],
                    p_deadline_at[v_low:v_high], p_deadline_ms[v_low:v_high], v_now, p_node[v_low:v_high], p_deps[v_low:v_high],
                    null);
            end loop;
            if cardinality(p_edge) > 0 then
                insert into flowfabric.edge
                    (partition, flow_id, edge_id, upstream, downstream, data_passing_ref, passes, created_at, applied_at, from_run)
                select p_partition, p_flow, u.edge, case when u.f > 0 then p_id[u.f] else p_old[-u.f] end, p_id[u.t],
                       u.ref, u.passes, v_now, v_now,
                       case when u.f > 0 then 0 else (select e.replays from flowfabric.execution e
                                                      where e.partition = p_partition and e.id = p_old[-u.f]) end
                from unnest(p_edge, p_from, p_to, p_passes, p_ref) as u (edge, f, t, passes, ref);
                update flowfabric.execution e set has_inputs = true
                from (select distinct x.tid from unnest(p_to, p_passes) as u (t, passes)
                      cross join lateral (select y.ctid as tid from flowfabric.execution y
                                          where y.partition = p_partition and y.id = p_id[u.t] offset 0) x
                      where u.passes) n
                where e.ctid = n.tid;
                insert into flowfabric.edge_group (partition, flow_id, downstream, policy, k, cancel_rest, n)
                select p_partition, p_flow, p_id[u.ord], coalesce(j.policy, 'all_of'), j.k, coalesce(j.cancel, false), u.n
                from unnest(p_deps) with ordinality as u (n, ord)
                left join unnest(p_join_of, p_join_policy, p_join_k, p_join_cancel) as j (of, policy, k, cancel) on j.of = u.ord
                where u.n > 0;
            end if;
            if not p_new then
                update flowfabric.flow f
                set node_count = f.node_count + cardinality(p_id), edge_count = f.edge_count + cardinality(p_edge),
                    last_mutation_at = v_now
                where f.partition = p_partition and f.flow_id = p_flow;
            end if;
            select f.node_count + f.edge_count into revision from flowfabric.flow f
            where f.partition = p_partition and f.flow_id = p_flow;
            insert into flowfabric.flow_touched values (p_partition, p_flow);
            perform flowfabric.settle_new(
                v_routes, null, p_route_no, v_partitions, p_id, p_priority, p_tags,
                p_delay_until is not null or p_delay_ms is not null,
                p_deadline_at is not null or p_deadline_ms is not null, v_made, v_now);
            if cardinality(p_old) > 0 then
                -- Upstreams that have ended count immediately.
                select array_agg(u.edge order by up.completed_at, u.ord), array_agg(p_id[u.t] order by up.completed_at, u.ord),
                       array_agg(flowfabric.outcome_of(up.state) order by up.completed_at, u.ord)
                into v_edges, v_downstreams, v_outcomes
                from unnest(p_edge, p_from, p_to) with ordinality as u (edge, f, t, ord)
                cross join lateral (select x.* from flowfabric.execution x where x.partition = p_partition
                                and x.id = p_old[-u.f] and x.completed_at is not null offset 0) up
                where u.f < 0;
                if v_edges is not null then
                    perform flowfabric.resolve_edges(
                        array_fill(p_partition, array[cardinality(v_edges)]), array_fill(p_flow, array[cardinality(v_edges)]),
                        v_edges, v_downstreams, v_outcomes, array_fill(null::bigint, array[cardinality(v_edges)]), v_now);
                end if;
                perform flowfabric.wake_for(v_partitions, p_id);
            end if;
            code := 'ok';
        exception when unique_violation then
            -- A given id is in use.
            select 'execution_already_in_flow', u.ord::integer into code, place
            from unnest(p_id) with ordinality as u (id, ord)
            join flowfabric.execution e on e.partition = p_partition and e.id = u.id order by u.ord limit 1;
            if code is null then
                select 'dependency_already_exists', u.ord::integer into code, place
                from unnest(p_edge) with ordinality as u (id, ord)
                join flowfabric.edge d on d.partition = p_partition and d.flow_id = p_flow and d.edge_id = u.id
                order by u.ord limit 1;
            end if;
            if code is null then
                raise exception 'an id was taken by a transaction this one cannot see' using errcode = 'serialization_failure';
            end if;
        end;
    end if;
    if p_new and code not in ('ok', 'exists') then
        delete from flowfabric.flow f where f.partition = p_partition and f.flow_id = p_flow;
    end if;
    return next;
end;
$$;
