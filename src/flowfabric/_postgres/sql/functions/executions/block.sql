-- block: claimable -> held back for a reason
--
-- Called by the scheduler and by operators. An execution that waits for a capable worker keeps its ready row: claims
-- find it by its route, which only capable workers serve.
-- Locks    the execution.
-- Returns  ok, or why not: not_found, execution_not_active (it ended), execution_not_eligible.
-- Roles    operate
create or replace function flowfabric.block(p_partition integer, p_id uuid, p_reason text, p_detail text)
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
        when p_reason not in ('waiting_for_budget', 'waiting_for_quota', 'waiting_for_capable_worker',
                              'paused_by_operator', 'paused_by_policy') then 'invalid_blocking_reason'
        when e.id is null then 'not_found'
        when e.completed_at is not null then 'execution_not_active'
        when e.state not in ('waiting', 'resumable') or e.blocking_reason <> 'waiting_for_worker'
             or flowfabric.is_uncovered(e, v_now) or exists (select from flowfabric.claim_grant g where g.partition = e.partition and g.id = e.id
                        and g.expires_at > v_now) then 'execution_not_eligible'
        else 'ok' end;
    if v_code = 'ok' then
        if p_reason <> 'waiting_for_capable_worker' then
            perform flowfabric.drop_ready(array[p_partition], array[p_id]);
        else
            delete from flowfabric.claim_grant g where g.partition = p_partition and g.id = p_id;   -- it expired unused
        end if;
        update flowfabric.execution x
        set state = case when p_reason in ('waiting_for_budget', 'waiting_for_quota') then 'rate_limited' else 'waiting' end,
            blocking_reason = p_reason, blocking_detail = coalesce(nullif(p_detail, ''), p_reason),
            capability_mismatch_at = case when p_reason = 'waiting_for_capable_worker' then v_now
                                          else x.capability_mismatch_at end,
            transitioned_at = v_now, mutated_at = null
        where x.partition = p_partition and x.id = p_id returning x.* into e;
        -- The limit is the caller's: the duty lets the next claim decide.
        insert into flowfabric.blocked (blocking_reason, created_at, id, partition, rank, limit_id, limit_key, blocked_at)
        values (p_reason, e.created_at, e.id, e.partition, flowfabric.rank_of(e.priority),
                case when e.state = 'rate_limited' then flowfabric.zero_uuid() end,
                case when e.state = 'rate_limited' then '' end, v_now);
        insert into flowfabric.flow_touched select e.partition, e.flow_id where e.flow_id is not null;
    end if;
    return query select 1, v_code, null::text, e.state, null::bigint, null::uuid, v_now;
end;
$$;
