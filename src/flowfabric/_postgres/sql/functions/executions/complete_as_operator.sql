-- complete_as_operator: active -> completed, with any lease holder
--
-- Called by operators. The worker that holds the lease is notified.
-- Locks    the execution.
-- Returns  one verdict: ok, or why it was refused.
-- Roles    operate
create or replace function flowfabric.complete_as_operator(
    p_partition integer, p_id uuid, p_result bytea, p_result_encoding text)
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
    perform flowfabric.tell_holders(array[p_partition], array[p_id]);
    return query select * from flowfabric.complete(
        array[p_partition], array[p_id], array[h.lease_id], array[h.epoch], array[h.attempt_id], array[h.attempt_index],
        array[p_result], array[p_result_encoding]);
end;
$$;
