-- delay_as_operator: active -> delayed, until a time, with any lease holder; the same attempt continues then
--
-- Called by operators.
-- Takes    the time, or how long from now.
-- Locks    the execution.
-- Returns  one verdict: ok and the time, or the reason it was refused.
-- Roles    operate
create or replace function flowfabric.delay_as_operator(p_partition integer, p_id uuid, p_until timestamptz, p_ms bigint)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    h flowfabric.held;
begin
    h := flowfabric.hold_as_operator(p_partition, p_id);
    if (h.refusal).code is not null then
        return next h.refusal;
        return;
    end if;
    return query select * from flowfabric.delay(
        p_partition, p_id, h.lease_id, h.epoch, h.attempt_id, h.attempt_index, p_until, p_ms);
end;
$$;
