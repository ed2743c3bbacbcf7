-- redact_execution: remove the user's data from an ended execution, and keep its history.
--
-- Payload, result, step results, output, failure texts, messages, reasons, tags, the idempotency key (which can be used again), its
-- creator and the policies of attempts are removed, and tags, operators' reasons and senders from its events; names, states
-- and times stay. It cannot be replayed any more: its input is gone.
-- Locks    the execution.
-- Returns  ok, not_found, execution_not_terminal, or execution_needed with the parent that needs its result, or that of its
--          flow, or with the unfinished node to which its result is passed, as detail.
-- Roles    operate
create or replace function flowfabric.redact_execution(p_partition integer, p_id uuid) returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    e flowfabric.execution;
    v_code text;
    v_parent text;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_code := case when e.id is null then 'not_found' when e.completed_at is null then 'execution_not_terminal' else 'ok' end;
    if v_code = 'ok' and (e.parent_id is not null or e.flow_id is not null) then
        v_parent := coalesce(
            flowfabric.kept_for(e.parent_id, flowfabric.result_step(e.id)),
            (select flowfabric.kept_for(f.parent_id, flowfabric.flow_result_step(f.flow_id)) from flowfabric.flow f
             where f.partition = p_partition and f.flow_id = e.flow_id),
            (select d.id || ' (' || d.state || ')' from flowfabric.edge x
             join flowfabric.execution d on d.partition = x.partition and d.id = x.downstream
             where x.partition = p_partition and x.upstream = p_id and d.completed_at is null
               and (x.passes or x.data_passing_ref is not null)
             order by d.id limit 1));
        v_code := case when v_parent is not null then 'execution_needed' else 'ok' end;
    end if;
    if v_code = 'ok' then
        perform flowfabric.drop_tags(array[p_partition], array[p_id]);
        delete from flowfabric.idempotency i
        where i.scope = coalesce(e.flow_id, flowfabric.zero_uuid()) and i.namespace = e.namespace
          and i.key = e.idempotency_key and i.id = e.id;
        perform flowfabric.redact_events(e);
        update flowfabric.execution x
        set payload = '', result = case when x.result is null then null else ''::bytea end,
            payload_encoding = 'redacted', result_encoding = case when x.result is null then x.result_encoding else 'redacted' end,
            failure_reason = case when x.failure_reason is null then null else '[redacted]' end,
            attempt_failure_reason = case when flowfabric.is_own_reason(x.attempt_failure_reason) then x.attempt_failure_reason
                                          when x.attempt_failure_reason is not null then '[redacted]' end,
            retry_reason = case when x.retry_reason is null then null else '[redacted]' end,
            replay_reason = case when x.replay_reason is null then null else '[redacted]' end,
            -- That it lost a race is not the user's text, and decides the state of its flow.
            cancellation_reason = case when x.cancellation_reason in ('sibling_quorum_satisfied', 'sibling_quorum_impossible')
                then x.cancellation_reason when x.cancellation_reason is not null then '[redacted]' end,
            tags = null, idempotency_key = null, creator = case when x.creator = '' then '' else '[redacted]' end,
            attempt_policy = null, cancelled_by = case when x.cancelled_by in
                ('operator_override', 'lease_holder', 'flow_cascade', 'system_timeout', 'parent', 'handler') then x.cancelled_by
                when x.cancelled_by is not null then '[redacted]' end,
            replay_requested_by = case when x.replay_requested_by is null then null else '[redacted]' end,
            lease_revoke_reason = case when x.lease_revoke_reason is null then null else '[redacted]' end,
            progress_message = null, mutated_at = flowfabric.now()
        where x.partition = p_partition and x.id = p_id;
        update flowfabric.attempt a
        set failure_reason = case when flowfabric.is_own_reason(a.failure_reason) then a.failure_reason
                                  when a.failure_reason is not null then '[redacted]' end,
            retry_reason = case when a.retry_reason is null then null else '[redacted]' end,
            replay_reason = case when a.replay_reason is null then null else '[redacted]' end,
            replay_requested_by = case when a.replay_requested_by is null then null else '[redacted]' end,
            policy_snapshot = null
        where a.partition = p_partition and a.id = p_id;
        update flowfabric.step s
        set result = case when s.result is null then null else ''::bytea end,
            encoding = case when s.result is null then s.encoding else 'redacted' end,
            outcome = case when s.kind = 'wait' and s.result is not null then 'redacted' else s.outcome end,
            error = case when s.error is null then null else '{"type": "redacted", "message": "[redacted]"}'::jsonb end
        where s.partition = p_partition and s.id = p_id;
        -- The sender of a signal is removed, but not which signals have the same sender.
        update flowfabric.signal g
        set payload = case when g.payload is null then null else ''::bytea end, payload_encoding = 'redacted',
            idempotency_key = null, source_hash = null,
            source_identity = case when g.source_identity = '' then '' else '[redacted] ' || f.first end,
            correlation_id = case when g.correlation_id = '' then '' else '[redacted]' end
        from (select x.ctid as tid, min(x.ordinal) over (partition by x.source_type, x.source_identity) as first
              from flowfabric.signal x where x.partition = p_partition and x.id = p_id) f
        where g.ctid = f.tid;
        update flowfabric.injected_input i set payload = '', encoding = 'redacted' where i.partition = p_partition and i.id = p_id;
        update flowfabric.edge d set kept_result = case when d.kept_result is null then null else ''::bytea end, kept_encoding = 'redacted'
        where d.partition = p_partition and d.upstream = p_id and d.is_kept;
        perform flowfabric.drop_frames(array[p_partition], array[p_id]);
        update flowfabric.suspension s set continuation_metadata_pointer = null
        where s.partition = p_partition and s.id = p_id;
    end if;
    return query select 1, v_code, 'needed by ' || v_parent, e.state, e.epoch, e.attempt_id, null::timestamptz;
end;
$$;

-- redact_events: remove tags, the reasons that operators gave, and the senders of signals from the events of an execution.
--
-- They are found by their time, as list_events does: the log has no index for executions. Those of signals have one: a
-- signal may be repeated long after the end.
create or replace function flowfabric.redact_events(e flowfabric.execution) returns void
language plpgsql as $$
declare
    v_margin constant interval := '5 minutes';
    v_from bigint := flowfabric.seek_event(e.created_at - v_margin);
    v_upto bigint := flowfabric.seek_event(e.completed_at + v_margin) + 1000;
begin
    update flowfabric.event v
    set tags = null, details = v.details - 'source_identity'
    where v.id = e.id and v.signal_effect is not null and v.partition = e.partition
      and (v.tags is not null or v.details ? 'source_identity');
    update flowfabric.event v
    set tags = null, details = v.details - 'source_identity',
        -- Others are words of ours.
        reason = case when v.reason is not null and (v.operator_type is not null or v.revoked_by = 'operator' and v.outcome is null)
                      then '[redacted]' else v.reason end
    where v.seq > v_from and v.seq <= v_upto and v.partition = e.partition and v.id = e.id
      and (v.tags is not null or v.details ? 'source_identity' or v.reason is not null);
end;
$$;

-- is_own_reason: whether the engine wrote the reason for the end of an attempt, which then says how its stream was closed.
create or replace function flowfabric.is_own_reason(p_reason text) returns boolean
language sql immutable as $$
    select p_reason in ('attempt_timeout', 'execution_deadline', 'suspension_timeout:fail', 'suspension_timeout:cancel',
                        'suspension_timeout:expire', 'max_reclaims_exceeded')
$$;
