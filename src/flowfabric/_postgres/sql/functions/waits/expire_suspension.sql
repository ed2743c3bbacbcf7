-- expire_suspension: expire_suspensions for one execution.
--
-- Locks    the execution.
-- Returns  done with the applied behaviour, or why there was nothing to do: not_found, not_suspended,
--          no_active_suspension or not_yet_due.
-- Roles    operate
create or replace function flowfabric.expire_suspension(p_partition integer, p_id uuid)
returns table (code text, behavior text)
language plpgsql security definer as $$
declare
    v_now timestamptz;
    e flowfabric.execution;
    s flowfabric.suspension;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    s := flowfabric.open_suspension(p_partition, p_id);
    code := case when e.id is null then 'not_found' when e.state <> 'suspended' then 'not_suspended'
                 when s.id is null then 'no_active_suspension'
                 when s.timeout_at <= v_now then 'done' else 'not_yet_due' end;
    if code = 'done' then
        behavior := flowfabric.known_behavior(s.timeout_behavior);
        perform flowfabric.expire_suspensions(array[p_partition], array[p_id], v_now);
    end if;
    return next;
end;
$$;
