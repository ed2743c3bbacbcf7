-- run_one: run one duty on one execution, regardless of its timers.
--
-- Locks    the execution.
-- Returns  'done', or why there was nothing to do: not_found, not_yet_due, or the state that prevents it.
-- Roles    operate
create or replace function flowfabric.run_one(p_kind text, p_partition integer, p_id uuid)
returns table (code text, state text, lease_lost text)
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_own timestamptz;
    e flowfabric.execution;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    select flowfabric.own_time(p_kind, e, d) into v_own from flowfabric.deployment d;
    code := case when e.id is null then 'not_found'
                 when v_own is null or (p_kind = 'delay' and e.stop_route is not null) then 'not_applicable'   -- not a delay
                 when v_own > v_now then 'not_yet_due' else 'done' end;
    state := e.state; lease_lost := e.lease_lost;
    if code = 'done' then
        perform flowfabric.act(p_kind, array[p_partition], array[p_id], v_now);
        select x.state, x.lease_lost into state, lease_lost
        from flowfabric.execution x where x.partition = p_partition and x.id = p_id;
    end if;
    return next;
end;
$$;
