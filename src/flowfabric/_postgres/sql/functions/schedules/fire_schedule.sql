-- fire_schedule: advance a schedule from the time the caller read, and create the due executions
--
-- Takes    the arguments of create_executions, then those of advance_schedule.
-- Locks    the schedule; then as create_executions.
-- Returns  the rows of create_executions; none if another process has advanced the schedule.
-- Roles    work, operate
create or replace function flowfabric.fire_schedule(
    p_lanes text[], p_kinds text[], p_capabilities text[],
    p_route_no integer[], p_partition integer[], p_id uuid[], p_id_given boolean,
    p_namespace text[], p_creator text[], p_payload bytea[], p_payload_encoding text[], p_priority integer[],
    p_flow uuid[], p_key text[], p_dedup_ms bigint[], p_tags text[], p_policy text[],
    p_budgets text[], p_quotas text[],
    p_delay_until timestamptz[], p_delay_ms bigint[], p_deadline_at timestamptz[], p_deadline_ms bigint[],
    p_name text, p_expected timestamptz, p_next timestamptz, p_last timestamptz)
returns table (ordinal integer, code text, id uuid, state text)
language plpgsql security definer as $$
#variable_conflict use_column
declare
    v_latest integer := cardinality(p_id);
begin
    perform flowfabric.require_read_committed();
    if not exists (select from flowfabric.advance_schedule(p_name, p_expected, p_next, p_last)) then
        return;
    end if;
    for ordinal, code, id, state in
        select c.ordinal, c.code, c.id, c.state
        from flowfabric.create_executions(
            p_lanes, p_kinds, p_capabilities, p_route_no, p_partition, p_id, p_id_given, p_namespace, p_creator, p_payload,
            p_payload_encoding, p_priority, p_flow, p_key, p_dedup_ms, p_tags, p_policy, p_budgets, p_quotas, p_delay_until,
            p_delay_ms, p_deadline_at, p_deadline_ms) c
    loop
        if code <> 'lane_closed' and ordinal in (0, v_latest) then
            perform flowfabric.schedule_made(p_name, p_partition[v_latest], p_id[v_latest]);
        end if;
        return next;
    end loop;
end;
$$;
