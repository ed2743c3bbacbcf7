-- expire_waitpoint: expire_waitpoints for the execution of one waitpoint.
--
-- Locks    the execution.
-- Returns  expired, or why there was nothing to do: not_found, not_pending, not_yet_due.
-- Roles    operate
create or replace function flowfabric.expire_waitpoint(p_partition integer, p_id uuid, p_waitpoint uuid) returns text
language plpgsql security definer as $$
declare
    v_now timestamptz;
    w flowfabric.waitpoint;
begin
    perform flowfabric.require_read_committed();
    perform 1 from flowfabric.execution e where e.partition = p_partition and e.id = p_id for no key update;
    v_now := flowfabric.now();
    select x.* into w from flowfabric.waitpoint x
    where x.partition = p_partition and x.waitpoint_id = p_waitpoint and x.id = p_id;
    if w.state = 'pending' and w.expires_at <= v_now then
        perform flowfabric.expire_waitpoints(array[p_partition], array[p_id], v_now);
        return 'expired';
    end if;
    return case when w.waitpoint_id is null then 'not_found' when w.state <> 'pending' then 'not_pending'
                else 'not_yet_due' end;
end;
$$;
