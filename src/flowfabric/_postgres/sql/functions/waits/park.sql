-- Waiting for other executions without holding a worker.

-- park: active -> delayed until a time or until one of some executions ends
--
-- Called by the worker that holds the lease. No time means: only their end. It may also wait for signals on pending
-- waitpoints of its own: p_seen is how many it knows of on each; the next one on any of them wakes it.
-- Locks    the execution and those it waits for, by partition and id, all at once: whatever ends one of them comes
--          before (and is seen here) or after (and finds the waiter rows).
-- Returns  one verdict: ok; ok with detail 'ended', 'due' or 'signal' when there is nothing to wait for (the lease is kept);
--          or the reason it was refused.
create or replace function flowfabric.park(
    p_partition integer, p_id uuid, p_lease uuid, p_epoch bigint, p_attempt uuid, p_index integer,
    p_until timestamptz, p_child_partition integer[], p_child_id uuid[], p_waitpoints uuid[], p_seen integer[])
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_detail text;
    v flowfabric.verdict;
begin
    perform flowfabric.require_read_committed();
    perform 1 from unnest(p_child_partition || p_partition, p_child_id || p_id) as u (partition, id)
    join flowfabric.execution e on e.partition = u.partition and e.id = u.id
    order by e.partition, e.id for no key update of e;
    v_detail := case
        when exists (select from unnest(p_child_partition, p_child_id) as u (partition, id)
                     left join flowfabric.execution e on e.partition = u.partition and e.id = u.id
                     where e.id is null or e.completed_at is not null) then 'ended'
        when exists (select from unnest(p_waitpoints, p_seen) as u (waitpoint_id, seen)
                     left join flowfabric.waitpoint w on w.partition = p_partition and w.waitpoint_id = u.waitpoint_id
                          and w.id = p_id
                     where w.id is null or w.state <> 'pending' or w.signal_count > u.seen) then 'signal'
        when p_until <= flowfabric.now() then 'due' end;
    if v_detail is not null and exists (
            select from flowfabric.holds_lease(p_partition, p_id, p_lease, p_epoch, p_attempt, p_index)) then
        return query select 1, 'ok', v_detail, 'active', null::bigint, null::uuid, flowfabric.now();
        return;
    end if;
    select p.* into v
    from flowfabric.pause('park', p_partition, p_id, p_lease, p_epoch, p_attempt, p_index, p_until, null, false) p;
    if v.code = 'ok' then
        perform flowfabric.forget_waits(array[p_partition], array[p_id]);
        insert into flowfabric.waiter (partition, id, awaited_partition, awaited_id)
        select distinct p_partition, p_id, u.partition, u.id from unnest(
            p_child_partition || array_fill(p_partition, array[cardinality(p_waitpoints)]),
            p_child_id || p_waitpoints) as u (partition, id)
        on conflict do nothing;
    end if;
    if exists (select from unnest(p_child_partition, p_child_id) as u (partition, id)
               join flowfabric.execution e on e.partition = u.partition and e.id = u.id and e.state = 'waiting') then
        perform flowfabric.wake_workers();   -- a claim that came meanwhile passed it over
    end if;
    return next v;
end;
$$;
