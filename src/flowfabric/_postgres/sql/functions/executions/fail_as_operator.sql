-- fail_as_operator: active -> delayed (another attempt follows) or failed, whoever holds the lease
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
    v_held flowfabric.verdict;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, null, null, null, null, true);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    perform flowfabric.tell_holders(array[p_partition], array[p_id]);
    return query
    select f.* from flowfabric.execution e
    cross join lateral flowfabric.fail(
        array[e.partition], array[e.id], array[e.lease_id], array[e.epoch], array[e.attempt_id], array[e.attempt_index],
        array[p_reason], array[p_class], array[p_category], array[p_retry_policy]) f
    where e.partition = p_partition and e.id = p_id;
end;
$$;
