-- block: an execution that may be claimed -> held back for a reason
--
-- Called by the scheduler and by operators. What waits for a capable worker keeps its ready row: claims find it by
-- its route, which a capable worker serves and no other does.
-- Locks    the execution.
-- Answers  ok, or why not: not_found, execution_not_active (it ended), execution_not_eligible.
create or replace function flowfabric.block(p_partition integer, p_id uuid, p_reason text, p_detail text)
returns setof flowfabric.verdict
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
declare
    v_now timestamptz;
    v_code text;
    e flowfabric.execution;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    v_code := case
        when p_reason not in ('waiting_for_budget', 'waiting_for_quota', 'waiting_for_capable_worker',
                              'paused_by_operator', 'paused_by_policy') then 'invalid_blocking_reason'
        when e.id is null then 'not_found'
        when e.completed_at is not null then 'execution_not_active'
        when e.state not in ('waiting', 'resumable') or e.blocking_reason <> 'waiting_for_worker'
             or exists (select from flowfabric.claim_grant g where g.partition = e.partition and g.id = e.id
                        and g.expires_at > v_now) then 'execution_not_eligible'
        else 'ok' end;
    if v_code = 'ok' then
        if p_reason <> 'waiting_for_capable_worker' then
            perform flowfabric.drop_ready(array[p_partition], array[p_id]);
        else
            delete from flowfabric.claim_grant g where g.partition = p_partition and g.id = p_id;   -- it lapsed unused
        end if;
        update flowfabric.execution x
        set state = case when p_reason in ('waiting_for_budget', 'waiting_for_quota') then 'rate_limited' else 'waiting' end,
            blocking_reason = p_reason, blocking_detail = coalesce(nullif(p_detail, ''), p_reason),
            capability_mismatch_at = case when p_reason = 'waiting_for_capable_worker' then v_now
                                          else x.capability_mismatch_at end,
            transitioned_at = v_now, mutated_at = v_now
        where x.partition = p_partition and x.id = p_id returning x.* into e;
        insert into flowfabric.blocked (blocking_reason, created_at, id, partition, blocked_at)
        values (p_reason, e.created_at, e.id, e.partition, v_now);
        insert into flowfabric.flow_touched select e.partition, e.flow_id where e.flow_id is not null;
    end if;
    return query select 1, v_code, null::text, e.state, null::bigint, null::uuid, v_now;
end;
$$;

-- unblock: held back for the expected reason -> may be claimed, in its old place
--
-- Locks    the execution.
-- Answers  ok, not_found or execution_not_eligible.
create or replace function flowfabric.unblock(p_partition integer, p_id uuid, p_expected text)
returns setof flowfabric.verdict
language plpgsql security definer set search_path = flowfabric, pg_temp
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off as $$
declare
    v_now timestamptz;
    v_code text;
    e flowfabric.execution;
begin
    select x.* into e from flowfabric.execution x where x.partition = p_partition and x.id = p_id for no key update;
    v_now := flowfabric.now();
    v_code := case
        when e.id is null then 'not_found'
        when e.held_back is not null and (p_expected is null or p_expected = e.held_back) then 'held'
        when e.state not in ('waiting', 'rate_limited', 'resumable') or e.blocking_reason not in
             ('waiting_for_budget', 'waiting_for_quota', 'waiting_for_capable_worker', 'paused_by_operator',
              'paused_by_policy')
             or (p_expected is not null and p_expected <> e.blocking_reason) then 'execution_not_eligible'
        else 'ok' end;
    if v_code = 'held' then
        -- It waits for its dependencies; once they are satisfied nothing holds it back any more.
        update flowfabric.execution x set held_back = null, mutated_at = v_now where x.partition = p_partition and x.id = p_id;
        v_code := 'ok';
    elsif v_code = 'ok' then
        delete from flowfabric.blocked b
        where b.blocking_reason = e.blocking_reason and b.created_at = e.created_at and b.id = e.id
          and b.partition = e.partition;
        update flowfabric.execution x
        set state = case when x.resume_pending then 'resumable' else 'waiting' end,
            blocking_reason = 'waiting_for_worker', blocking_detail = null, transitioned_at = v_now, mutated_at = v_now
        where x.partition = p_partition and x.id = p_id;
        if e.blocking_reason <> 'waiting_for_capable_worker' then
            perform flowfabric.make_ready(array[p_partition], array[p_id], null);
        end if;
    end if;
    return query select 1, v_code, null::text, e.state, null::bigint, null::uuid, v_now;
end;
$$;

-- scan_eligible: ids that may be claimed now, in claim order. For schedulers and tests, not for workers.
create or replace function flowfabric.scan_eligible(p_lane text, p_partition integer, p_limit integer)
returns table (partition integer, id uuid)
language sql stable security definer set search_path = flowfabric, pg_temp as $$
    select r.partition, r.id
    from flowfabric.route q join flowfabric.ready r on r.route = q.id
    join flowfabric.execution e on e.partition = r.partition and e.id = r.id
    where q.lane = p_lane and (p_partition is null or r.partition = p_partition)
      and e.state in ('waiting', 'resumable') and e.blocking_reason = 'waiting_for_worker'
    order by r.rank, r.created_at, r.id limit p_limit
$$;
