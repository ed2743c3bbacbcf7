-- complete_as_operator: active -> completed, whoever holds the lease
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
    select c.* from flowfabric.execution e
    cross join lateral flowfabric.complete(
        array[e.partition], array[e.id], array[e.lease_id], array[e.epoch], array[e.attempt_id], array[e.attempt_index],
        array[p_result], array[p_result_encoding]) c
    where e.partition = p_partition and e.id = p_id;
end;
$$;
