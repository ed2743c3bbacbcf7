-- cancel_as_operator: anything that has not ended -> cancelled, for many in one call
--
-- Called by operators, and by schedulers under a name of their own (p_source), which need the fence of an active one.
-- Takes    the fences, which may be null; p_source: operator_override, flow_cascade, system_timeout, or that name.
--          p_keep_children: what they submitted is not cancelled with them. p_by: the execution whose handler calls; its
--          children are recorded as cancelled by `handler`.
-- Locks    the executions, by partition and id.
-- Returns  one verdict per item, as cancel_executions does.
-- Roles    operate
create or replace function flowfabric.cancel_as_operator(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_source text, p_reason text, p_keep_children boolean, p_by uuid default null)
returns setof flowfabric.verdict
language sql volatile security definer as $$
    select * from flowfabric.cancel_executions(
        p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, false, p_source, p_reason, p_keep_children, p_by)
$$;
