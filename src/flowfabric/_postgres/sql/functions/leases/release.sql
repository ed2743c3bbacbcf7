-- release: active -> waiting, so that another worker continues the same attempt at once
--
-- Called by the lease holder, which gives the lease back.
-- Locks    the execution.
-- Returns  one verdict: ok, or the reason it was refused.
-- Roles    work, operate
create or replace function flowfabric.release(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_held flowfabric.verdict;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    return next flowfabric.give_back(p_partition, p_id, 'waiting', false, null, null, 'worker_release', v_held.at);
end;
$$;
