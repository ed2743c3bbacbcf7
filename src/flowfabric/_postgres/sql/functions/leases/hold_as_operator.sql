-- hold_as_operator: lock one execution, and return the fence of its lease holder
--
-- Called by the functions of operators, which then call the worker's function with this fence.
-- Locks    the execution.
-- Returns  the fence; or the refusal, if no lease is live.
create or replace function flowfabric.hold_as_operator(p_partition integer, p_id uuid) returns flowfabric.held
language plpgsql as $$
declare
    h flowfabric.held;
    v flowfabric.verdict;
begin
    perform flowfabric.require_read_committed();
    select e.lease_id, e.epoch, e.attempt_id, e.attempt_index into h.lease_id, h.epoch, h.attempt_id, h.attempt_index
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id for no key update;
    -- An execution that was never claimed has no fence; any fence is refused for the right reason.
    v := flowfabric.hold_one(p_partition, p_id, coalesce(h.lease_id, flowfabric.zero_uuid()), coalesce(h.epoch, 0),
                             coalesce(h.attempt_id, flowfabric.zero_uuid()), h.attempt_index);
    if v.code is not null then
        h.refusal := v;
    end if;
    return h;
end;
$$;
