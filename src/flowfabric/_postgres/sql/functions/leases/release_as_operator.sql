-- release_as_operator: active -> waiting, whoever holds the lease; another worker continues the same attempt at once
--
-- Called by operators.
-- Locks    the execution.
-- Returns  one verdict: ok, or the reason it was refused.
-- Roles    operate
create or replace function flowfabric.release_as_operator(p_partition integer, p_id uuid)
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
    select r.* from flowfabric.execution e
    cross join lateral flowfabric.release(e.partition, e.id, e.lease_id, e.epoch, e.attempt_id, e.attempt_index) r
    where e.partition = p_partition and e.id = p_id;
end;
$$;
