-- delay: active -> delayed, until a time; the same attempt continues then
--
-- Called by the lease holder, which gives the lease back.
-- Takes    the fence; the time, or how long from now.
-- Locks    the execution.
-- Returns  one verdict: ok and the time, or the reason it was refused.
-- Roles    work, operate
create or replace function flowfabric.delay(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_until timestamptz, p_ms bigint)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_held flowfabric.verdict;
    v_until timestamptz;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    v_until := coalesce(p_until, v_held.at + flowfabric.ms(p_ms));
    perform flowfabric.check_time(v_until);
    return next flowfabric.give_back(
        p_partition, p_id, 'delayed', false, v_until, 'delayed until ' || flowfabric.time_text(v_until), 'worker_delay',
        v_held.at);
end;
$$;
