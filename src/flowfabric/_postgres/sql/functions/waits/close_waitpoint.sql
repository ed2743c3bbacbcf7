-- close_waitpoint: the holder closes a pending waitpoint that it no longer needs
--
-- Locks    the execution.
-- Returns  one verdict: ok (also if it is already closed), or why not.
-- Roles    work, operate
create or replace function flowfabric.close_waitpoint(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer, p_waitpoint uuid,
    p_reason text)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_held flowfabric.verdict;
    v_code text;
    w flowfabric.waitpoint;
begin
    perform flowfabric.require_read_committed();
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    v_now := v_held.at;
    select x.* into w from flowfabric.waitpoint x where x.waitpoint_id = p_waitpoint;
    v_code := case when w.waitpoint_id is null then 'waitpoint_not_found'
                   when w.id <> p_id then 'invalid_waitpoint_for_execution'
                   when w.state = 'active' then 'waitpoint_not_pending' else 'ok' end;
    if v_code = 'ok' and w.state = 'pending' then
        update flowfabric.waitpoint x set state = 'closed', closed_at = v_now, close_reason = p_reason
        where x.partition = p_partition and x.waitpoint_id = p_waitpoint;
    end if;
    return query select 1, v_code, null::text, 'active', p_epoch, p_attempt, v_now;
end;
$$;
