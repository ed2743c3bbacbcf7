-- hold_one: lock one execution and check that the caller holds its lease: lock_holders and refuse_holders for one item
--
-- Called by the calls of a lease holder that take one execution.
-- Locks    the execution.
-- Returns  the refusal; or, if the lease is held, a verdict without a code, whose `at` is the time under the lock.
create or replace function flowfabric.hold_one(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer)
returns flowfabric.verdict
language plpgsql as $$
declare
    v flowfabric.verdict;
    v_now timestamptz;
    v_ok integer[];
begin
    select l.at, l.ok into v_now, v_ok
    from flowfabric.lock_holders(array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt],
                                 array[p_index]) l;
    if cardinality(v_ok) = 0 then
        select r.* into v from flowfabric.refuse_holders(
            array[p_partition], array[p_id], array[p_lease], array[p_epoch], array[p_attempt], array[p_index],
            null, v_ok, v_now) r;
    else
        v.at := v_now;
    end if;
    return v;
end;
$$;
