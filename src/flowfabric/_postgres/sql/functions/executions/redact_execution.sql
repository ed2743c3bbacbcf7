-- redact_execution: remove the user's data from an ended execution, and keep its history.
--
-- Payload, result, step results, failure texts, messages and reasons are removed; names, states and times stay.
-- Locks    the execution.
-- Returns  ok, not_found, or execution_not_terminal.
-- Roles    operate
create or replace function flowfabric.redact_execution(p_partition integer, p_id uuid) returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    e flowfabric.execution;
    v_code text;
begin
    perform flowfabric.require_read_committed();
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_code := case when e.id is null then 'not_found' when e.completed_at is null then 'execution_not_terminal' else 'ok' end;
    if v_code = 'ok' then
        update flowfabric.execution x
        set payload = '', result = case when x.result is null then null else ''::bytea end,
            payload_encoding = 'redacted', result_encoding = case when x.result is null then x.result_encoding else 'redacted' end,
            failure_reason = case when x.failure_reason is null then null else '[redacted]' end,
            attempt_failure_reason = case when x.attempt_failure_reason is null then null else '[redacted]' end,
            retry_reason = case when x.retry_reason is null then null else '[redacted]' end,
            replay_reason = case when x.replay_reason is null then null else '[redacted]' end,
            -- That it lost a race is not the user's text, and decides the state of its flow.
            cancellation_reason = case when x.cancellation_reason in ('sibling_quorum_satisfied', 'sibling_quorum_impossible')
                then x.cancellation_reason when x.cancellation_reason is not null then '[redacted]' end,
            progress_message = null, mutated_at = flowfabric.now()
        where x.partition = p_partition and x.id = p_id;
        update flowfabric.attempt a
        set failure_reason = case when a.failure_reason is null then null else '[redacted]' end,
            retry_reason = case when a.retry_reason is null then null else '[redacted]' end,
            replay_reason = case when a.replay_reason is null then null else '[redacted]' end
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
        update flowfabric.suspension s set continuation_metadata_pointer = null
        where s.partition = p_partition and s.id = p_id;
    end if;
    return query select 1, v_code, null::text, e.state, e.epoch, e.attempt_id, null::timestamptz;
end;
$$;
