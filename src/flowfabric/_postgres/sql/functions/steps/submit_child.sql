-- submit_child: create one execution and record it as a step of its parent, whose lease is held
--
-- Takes    the arguments of create_executions for one item, then the fence, the name and the number of the step.
-- Locks    as may_submit, which holds the lease until the transaction ends; then as create_executions.
-- Returns  the row of create_executions; none if the fence does not match or a child is already recorded. A child
--          that a closed lane refuses is not recorded.
-- Roles    work, operate
create or replace function flowfabric.submit_child(
    p_lanes text[], p_kinds text[], p_capabilities text[],
    p_route_no integer[], p_partition integer[], p_id uuid[], p_id_given boolean,
    p_namespace text[], p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[],
    p_flow uuid[], p_key text[], p_dedup_ms bigint[], p_tags text[], p_policy text[],
    p_budgets text[], p_quota uuid[],
    p_delay_until timestamptz[], p_delay_ms bigint[], p_deadline_at timestamptz[], p_deadline_ms bigint[],
    p_holder_partition integer, p_holder_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_name text, p_n integer)
returns table (ordinal integer, code text, id uuid, state text)
language plpgsql security definer as $$
#variable_conflict use_column
begin
    perform flowfabric.require_read_committed();
    if not exists (select from flowfabric.may_submit(p_holder_partition, p_holder_id, p_lease, p_epoch, p_attempt, p_index,
                                                     p_name, p_n)) then
        return;
    end if;
    select c.ordinal, c.code, c.id, c.state into ordinal, code, id, state
    from flowfabric.create_executions(
        p_lanes, p_kinds, p_capabilities, p_route_no, p_partition, p_id, p_id_given, p_namespace, p_creator, p_payload,
        p_payload_encoding, p_priority, p_flow, p_key, p_dedup_ms, p_tags, p_policy, p_budgets, p_quota, p_delay_until,
        p_delay_ms, p_deadline_at, p_deadline_ms) c;
    if code <> 'lane_closed' then
        perform flowfabric.record_steps(
            array[p_holder_partition], array[p_holder_id], array[p_lease], array[p_epoch], array[p_attempt],
            array[p_index], array[p_name], array[p_n], array['submit'], null, null, null, null, null,
            array[case when ordinal = 0 then p_partition[1]
                       else flowfabric.partition_of(id, (select d.flow_partitions from flowfabric.deployment d)) end],
            array[case when ordinal = 0 then p_id[1] else id end],
            array[case when code = 'duplicate' then 'known' end]);
    end if;
    return next;
end;
$$;
