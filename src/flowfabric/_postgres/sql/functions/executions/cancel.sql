-- cancel: active -> cancelled by the lease holder, for many in one call
--
-- Called by the worker that holds the leases; cancel_as_operator needs none.
-- Takes    the fences. p_is_handle: they are handles, whose attempt is the only one they can cancel; else an execution
--          that is cancelled already is ok too.
--          p_keep_children: what they submitted is not cancelled with them.
-- Locks    the executions, by partition and id.
-- Returns  one verdict per item, as cancel_executions does.
-- Roles    work, operate
create or replace function flowfabric.cancel(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_is_handle boolean, p_reason text, p_keep_children boolean)
returns setof flowfabric.verdict
language sql volatile security definer as $$
    select * from flowfabric.cancel_executions(
        p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, p_is_handle, 'lease_holder', p_reason, p_keep_children, null)
$$;
