-- complete: active -> completed, for many in one call
--
-- Called by the worker that holds the leases.
-- Locks    the executions, by partition and id.
-- Returns  one verdict with ordinal 0 for all items that succeeded, and one for every other: replayed, or why it was
--          refused.
-- Roles    work, operate
create or replace function flowfabric.complete(
    p_partition integer[], p_id uuid[], p_lease uuid[], p_epoch bigint[], p_attempt uuid[], p_index integer[],
    p_result bytea[], p_result_encoding text[])
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_ok integer[];
    v_tids tid[];
begin
    perform flowfabric.require_read_committed();
    select l.at, l.ok, l.tids into v_now, v_ok, v_tids
    from flowfabric.lock_holders(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index) l;
    if cardinality(v_ok) = cardinality(p_id) then
        perform flowfabric.end_executions(
            p_partition, p_id, v_tids, 'completed', 'completed', p_result, p_result_encoding,
            null, null, null, null, 'completed', 'backend', true, v_now);
    else
        perform flowfabric.end_executions(
            array_agg(p_partition[o]), array_agg(p_id[o]), v_tids, 'completed', 'completed',
            array_agg(p_result[o]), array_agg(p_result_encoding[o]),
            null, null, null, null, 'completed', 'backend', true, v_now)
        from unnest(v_ok) o having count(*) > 0;
        return query select * from flowfabric.refuse_holders(
            p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, 'completed', v_ok, v_now);
    end if;
    return query select 0, 'ok', null::text, 'completed', null::bigint, null::uuid, v_now;
end;
$$;
