-- submit_child_flow: create a whole graph and record it as a step of its parent, whose lease is held
--
-- Takes    the arguments of grow_flow for a new flow, then the fence, the name and the number of the step, the bytes
--          from which the ids of the graph were made, and p_detached: it is no child of the execution that submits it.
-- Locks    as may_submit, which holds the lease until the transaction ends; then as grow_flow.
-- Returns  the row of grow_flow; none if the fence does not match or a flow is already recorded. A flow that is refused
--          is not recorded.
-- Roles    work, operate
create or replace function flowfabric.submit_child_flow(
    p_partition integer, p_flow uuid, p_new boolean, p_kind text, p_flow_namespace text, p_flow_tags text,
    p_lanes text[], p_kinds text[], p_capabilities text[], p_route_no integer[], p_id uuid[], p_node text[],
    p_namespace text[], p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[],
    p_tags text[], p_policy text[], p_budgets text[], p_quotas text[],
    p_delay_until timestamptz[], p_delay_ms bigint[], p_deadline_at timestamptz[], p_deadline_ms bigint[],
    p_old uuid[], p_edge uuid[], p_from integer[], p_to integer[], p_ref text[], p_passes boolean[], p_deps integer[],
    p_join_of integer[], p_join_policy text[], p_join_k integer[], p_join_cancel boolean[],
    p_holder_partition integer, p_holder_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_name text, p_n integer, p_seed bytea, p_detached boolean)
returns table (code text, place integer, revision bigint)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_of bigint;   -- the limit set of its parent
begin
    perform flowfabric.require_read_committed();
    if not p_new then
        raise exception 'a child is a new flow' using errcode = 'invalid_parameter_value';
    end if;
    select m.limits into v_of from flowfabric.may_submit(p_holder_partition, p_holder_id, p_lease, p_epoch, p_attempt, p_index,
                                                         p_name, p_n) m;
    if not found then
        return;
    end if;
    if v_of is not null and not p_detached then
        p_budgets := flowfabric.inherited_budgets(p_budgets, p_policy, cardinality(p_id), v_of);
    end if;
    select g.code, g.place, g.revision into code, place, revision
    from flowfabric.grow_flow(
        p_partition, p_flow, true, p_kind, p_flow_namespace, p_flow_tags, p_lanes, p_kinds, p_capabilities, p_route_no,
        p_id, p_node, p_namespace, p_creator, p_payload, p_payload_encoding, p_priority, p_tags, p_policy, p_budgets,
        p_quotas, p_delay_until, p_delay_ms, p_deadline_at, p_deadline_ms, p_old, p_edge, p_from, p_to, p_ref, p_passes,
        p_deps, p_join_of, p_join_policy, p_join_k, p_join_cancel) g;
    if code = 'ok' and not p_detached then
        update flowfabric.flow f set parent_id = p_holder_id where f.partition = p_partition and f.flow_id = p_flow;
    end if;
    if code in ('ok', 'exists') then
        insert into flowfabric.step
            (partition, id, generation, name, n, kind, run, attempt_index, result, outcome, flow_id, recorded_at)
        select e.partition, e.id, e.generation, p_name, p_n, 'submit', e.retries + e.replays, e.attempt_index, p_seed,
               case when code = 'exists' then 'known' end, p_flow, flowfabric.now()
        from flowfabric.execution e where e.partition = p_holder_partition and e.id = p_holder_id;
    end if;
    return next;
end;
$$;
