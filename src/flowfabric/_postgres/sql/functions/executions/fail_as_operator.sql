-- fail_as_operator: active -> delayed (another attempt follows) or failed, with any lease holder; stopped by changed code
-- -> failed
--
-- Called by operators. The worker that holds the lease is notified.
-- Takes    the reason, its class and category, and optionally a retry policy instead of the frozen one.
-- Locks    the execution.
-- Returns  one verdict: as fail.
-- Roles    operate
create or replace function flowfabric.fail_as_operator(
    p_partition integer, p_id uuid, p_reason text, p_class text, p_category text, p_retry_policy text)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    h flowfabric.held;
begin
    h := flowfabric.hold_as_operator(p_partition, p_id);
    if (h.refusal).code = 'execution_not_active' and exists (
            select from flowfabric.execution e
            where e.partition = p_partition and e.id = p_id and flowfabric.is_stopped(e)) then
        perform flowfabric.end_executions(
            array[p_partition], array[p_id], null, 'failed', 'terminal_failed', null, null, array[p_reason],
            array[p_category], null, null, null, null, false, flowfabric.now());
        return query
        select 1, 'ok', 'terminal_failed', e.state, e.attempts::bigint, null::uuid, null::timestamptz
        from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
        return;
    elsif (h.refusal).code is not null then
        return next h.refusal;
        return;
    end if;
    perform flowfabric.tell_holders(array[p_partition], array[p_id]);
    return query select * from flowfabric.fail(
        array[p_partition], array[p_id], array[h.lease_id], array[h.epoch], array[h.attempt_id], array[h.attempt_index],
        array[p_reason], array[p_class], array[p_category], array[p_retry_policy]);
end;
$$;
