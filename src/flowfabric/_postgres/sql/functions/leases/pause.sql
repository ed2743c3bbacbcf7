-- pause: active -> delayed, waiting_children or waiting, the same attempt to be continued later
--
-- Calls of a lease holder that give the lease back without ending the attempt:
--   delay          until a time
--   wait_children  until its dependencies are satisfied; if they are, it may be claimed at once
--   release        for another worker, at once
-- Locks    for wait_children the execution's group; the execution.
-- Returns  one verdict: ok, or the reason it was refused.
create or replace function flowfabric.pause(
    p_call text, p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_delay_until timestamptz, p_delay_ms bigint, p_operator boolean)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_held flowfabric.verdict;
    v_until timestamptz;
    v_state text := case when p_call = 'delay' then 'delayed' else 'waiting' end;
    v_group text;
begin
    if p_call not in ('delay', 'wait_children', 'release') then
        raise exception 'unknown call %', p_call using errcode = 'FF001';
    end if;
    if p_call = 'wait_children' then
        perform flowfabric.require_read_committed();
        select g.state into v_group from flowfabric.execution e
        join flowfabric.edge_group g on g.partition = e.partition and g.flow_id = e.flow_id and g.downstream = e.id
        where e.partition = p_partition and e.id = p_id and g.n > 0 for update of g;
        if v_group <> 'satisfied' then
            v_state := 'waiting_children';
        end if;
    end if;
    v_held := flowfabric.hold_one(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, p_operator);
    if v_held.code is not null then
        return next v_held;
        return;
    end if;
    if v_state = 'delayed' then
        v_until := coalesce(p_delay_until, v_held.at + flowfabric.ms(p_delay_ms));
    end if;
    perform flowfabric.give_back(
        p_partition, p_id, v_state, false, v_until,
        case v_state when 'waiting_children' then 'waiting for child executions to complete'
            when 'delayed' then 'delayed until ' || to_char(v_until at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') end,
        case p_call when 'delay' then 'worker_delay' when 'release' then 'worker_release' else 'waiting_children' end,
        v_held.at);
    return query
    select 1, 'ok', null::text, e.state, null::bigint, null::uuid, v_until
    from flowfabric.execution e where e.partition = p_partition and e.id = p_id;
end;
$$;
