-- unblock: held back for the expected reason -> claimable, in its old position
--
-- One that waits because no live worker covers its route: the verdict is lifted, until the next that is made.
-- Locks    the execution.
-- Returns  ok, not_found or execution_not_eligible.
-- Roles    operate
create or replace function flowfabric.unblock(p_partition integer, p_id uuid, p_expected text)
returns setof flowfabric.verdict
language plpgsql security definer as $$
declare
    v_now timestamptz;
    v_code text;
    e flowfabric.execution;
begin
    e := flowfabric.lock_execution(p_partition, p_id);
    v_now := flowfabric.now();
    v_code := case
        when e.id is null then 'not_found'
        when e.held_back is not null and (p_expected is null or p_expected = e.held_back) then 'held'
        when coalesce(p_expected, 'waiting_for_capable_worker') = 'waiting_for_capable_worker'
             and flowfabric.is_uncovered(e, v_now) then 'uncovered'
        when e.state not in ('waiting', 'rate_limited', 'resumable') or e.blocking_reason not in
             ('waiting_for_budget', 'waiting_for_quota', 'waiting_for_capable_worker', 'paused_by_operator',
              'paused_by_policy')
             or (p_expected is not null and p_expected <> e.blocking_reason) then 'execution_not_eligible'
        else 'ok' end;
    if v_code = 'held' then
        -- It waits for its dependencies; once they are satisfied, it is no longer held back.
        update flowfabric.execution x set held_back = null, mutated_at = v_now where x.partition = p_partition and x.id = p_id;
        v_code := 'ok';
    elsif v_code = 'uncovered' then
        delete from flowfabric.uncovered u where u.route = flowfabric.ready_route(e);
        v_code := 'ok';
    elsif v_code = 'ok' then
        delete from flowfabric.blocked b
        where b.blocking_reason = e.blocking_reason and b.created_at = e.created_at and b.id = e.id
          and b.partition = e.partition;
        update flowfabric.execution x
        set state = case when x.resume_pending then 'resumable' else 'waiting' end,
            blocking_reason = 'waiting_for_worker', blocking_detail = null, transitioned_at = v_now, mutated_at = null
        where x.partition = p_partition and x.id = p_id;
        if e.stop_route is not null then
            perform flowfabric.open_stopped(array[p_partition], array[p_id], v_now);
        elsif e.blocking_reason <> 'waiting_for_capable_worker' then
            perform flowfabric.make_ready(array[p_partition], array[p_id], null);
        end if;
    end if;
    return query select 1, v_code, null::text, e.state, null::bigint, null::uuid, v_now;
end;
$$;
