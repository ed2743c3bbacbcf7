-- resume_execution: an operator ends a suspension regardless of its condition
--
-- Locks    the execution.
-- Returns  one verdict: ok with the state, not_found or execution_not_suspended.
-- Roles    operate
create or replace function flowfabric.resume_execution(p_partition integer, p_id uuid, p_trigger text, p_delay_ms bigint)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_slot smallint;
    e flowfabric.execution;
    s flowfabric.suspension;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    if e.id is null or e.state <> 'suspended' then
        return query select 1, case when e.id is null then 'not_found' else 'execution_not_suspended' end, null::text,
                            e.state, e.epoch, e.attempt_id, null::timestamptz;
        return;
    end if;
    s := flowfabric.open_suspension(p_partition, p_id);
    perform flowfabric.close_suspension(
        p_partition, p_id, s.number, s.waitpoint_ids, 'operator_resumed', p_trigger, null, null, null, null,
        v_now);
    perform flowfabric.resume(p_partition, p_id, p_delay_ms, v_now);
    v_slot := flowfabric.open_log(v_now);
    insert into flowfabric.event (slot, route, occurred_at, partition, id, flow_id, namespace, tags, operator_type, attempt_id,
                                  attempt_index, details)
    values (v_slot, e.route, v_now, e.partition, e.id, e.flow_id, e.namespace, e.tags, 'resumed', e.attempt_id, e.attempt_index,
            jsonb_build_object('trigger_type', p_trigger, 'suspension_id', s.suspension_id, 'resume_delay_ms', p_delay_ms));
    return query select 1, 'ok', null::text, x.state, x.epoch, x.attempt_id, x.delay_until
    from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
end;
$$;
