-- progress: record how far the attempt is; a null argument keeps the stored value
--
-- Called by the worker that holds the lease.
-- Locks    the execution.
-- Roles    work, operate
create or replace function flowfabric.progress(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_percent smallint, p_message text)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_held flowfabric.verdict;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    v_now := v_held.at;
    update flowfabric.execution e
    set progress_pct = coalesce(p_percent, e.progress_pct), progress_message = coalesce(p_message, e.progress_message),
        progress_updated_at = v_now
    where e.partition = p_partition and e.id = p_id;
    return query select 1, 'ok', null::text, 'active', null::bigint, null::uuid, v_now;
end;
$$;
