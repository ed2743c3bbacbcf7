-- delay_as_operator: active -> delayed, until a time, whoever holds the lease; the same attempt continues then
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
    v_held flowfabric.verdict;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, null, null, null, null, true);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    return query
    select d.* from flowfabric.execution e
    cross join lateral flowfabric.delay(e.partition, e.id, e.lease_id, e.epoch, e.attempt_id, e.attempt_index, p_until, p_ms) d
    where e.partition = p_partition and e.id = p_id;
end;
$$;
