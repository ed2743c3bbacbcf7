-- submit_child: create one execution and record it as a step of its parent, whose lease is held
--
-- Takes    the arguments of create_executions for one item, then the fence, the name and the number of the step;
--          p_detached: it is no child of the execution that submits it; p_known: a known key is recorded too.
-- Locks    as may_submit, which holds the lease until the transaction ends; then as create_executions.
-- Returns  the row of create_executions; none if the fence does not match or a child is already recorded. A child
--          that a closed lane refuses is not recorded, nor without p_known one whose key is known.
-- Roles    work, operate
create or replace function flowfabric.submit_child(
    p_lanes text[], p_kinds text[], p_capabilities text[],
    p_route_no integer[], p_partition integer[], p_id uuid[], p_id_given boolean,
    p_namespace text[], p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[],
    p_flow uuid[], p_key text[], p_dedup_ms bigint[], p_tags text[], p_policy text[],
    p_budgets text[], p_quotas text[],
    p_delay_until timestamptz[], p_delay_ms bigint[], p_deadline_at timestamptz[], p_deadline_ms bigint[],
    p_holder_partition integer, p_holder_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_name text, p_n integer, p_detached boolean, p_known boolean)
returns table (ordinal integer, code text, id uuid, state text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_code text[];
    v_standing uuid[];
    v_routes integer[];
    v_limits bigint[];
    v_made integer;
    v_of bigint;   -- the limit set of its parent
begin
    perform flowfabric.require_read_committed();
    if cardinality(p_id) <> 1 or (not p_detached and p_partition[1] <> p_holder_partition) then
        raise exception 'a child is one execution in the partition of its parent' using errcode = 'invalid_parameter_value';
    end if;
    select m.limits into v_of from flowfabric.may_submit(p_holder_partition, p_holder_id, p_lease, p_epoch, p_attempt, p_index,
                                                         p_name, p_n) m;
    if not found then
        return;
    end if;
    v_now := flowfabric.now();
    if p_key is not null then
        select k.code, k.standing into v_code, v_standing
        from flowfabric.take_keys(p_flow, p_namespace, p_key, p_id, p_dedup_ms, null, v_now) k;
    end if;
    if v_code[1] is null and p_id_given and exists (
            select from flowfabric.execution e where e.partition = p_partition[1] and e.id = p_id[1]) then
        v_code := array['exists'];
    end if;
    if v_code[1] is null then
        if v_of is not null and not p_detached then
            p_budgets := flowfabric.inherited_budgets(p_budgets, p_policy, 1, v_of);
        end if;
        select b.p_budgets, b.p_quotas into p_budgets, p_quotas
        from flowfabric.bind_items(1, p_lanes, p_kinds, p_route_no, p_namespace, p_tags, null, p_budgets, p_quotas) b;
        if num_nonnulls(p_budgets, p_quotas) > 0 then
            p_budgets := flowfabric.own_budgets(p_budgets, p_id);
            v_limits := flowfabric.intern_items(p_budgets, p_quotas, p_tags, null);
        end if;
        v_routes := flowfabric.resolve_routes(p_lanes, p_kinds, p_capabilities, array[v_limits[1] is not null], v_now);
        if v_routes[1] is null then
            v_code := array['lane_closed'];
        else
            v_made := flowfabric.insert_executions(
                v_routes, null, p_route_no, p_partition, p_id, p_namespace, p_creator, p_payload, p_payload_encoding,
                p_priority, null, p_key, p_tags, p_policy, v_limits, p_delay_until, p_delay_ms, p_deadline_at,
                p_deadline_ms, v_now, null, null, case when not p_detached then p_holder_id end);
            perform flowfabric.settle_new(
                v_routes, null, p_route_no, p_partition, p_id, p_priority, p_tags,
                p_delay_until is not null or p_delay_ms is not null,
                p_deadline_at is not null or p_deadline_ms is not null, v_made, v_now);
        end if;
    end if;
    if p_key is not null and v_code[1] in ('exists', 'lane_closed') then
        perform flowfabric.give_back_keys(p_flow, p_namespace, p_key, p_id, v_code, v_now);
    end if;
    ordinal := 1;
    code := case when v_code[1] = 'lane_closed' then 'lane_closed' when v_code[1] is null then 'created' else 'duplicate' end;
    id := coalesce(v_standing[1], p_id[1]);
    if code = 'created' or code = 'duplicate' and p_known then
        insert into flowfabric.step
            (partition, id, generation, name, n, kind, run, attempt_index, outcome, child_partition, child_id, recorded_at)
        select e.partition, e.id, e.generation, p_name, p_n, 'submit', e.retries + e.replays, e.attempt_index,
               case when code = 'duplicate' then 'known' end,
               flowfabric.partition_of(submit_child.id, d.flow_partitions), submit_child.id, v_now
        from flowfabric.execution e, flowfabric.deployment d
        where e.partition = p_holder_partition and e.id = p_holder_id;
    end if;
    select e.state into state from flowfabric.execution e where e.partition = p_partition[1] and e.id = p_id[1];
    return next;
end;
$$;
