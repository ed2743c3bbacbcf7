-- audit_state_facts: The stored facts agree with the state: each state has the columns it needs and no others.
create or replace function flowfabric.audit_state_facts(
    p_low integer, p_high integer, p_from uuid, p_to uuid) returns setof flowfabric.violation
language sql stable as $$
    with e as (
        select x.* from flowfabric.execution x where (x.partition, x.id) between (p_low, p_from) and (p_high, p_to)
    )
    select 'state_facts', e.partition, e.id, concat_ws(' ', e.state, e.blocking_reason, e.pending,
                                                               e.resume_pending, e.lease_lost) as detail
    from e where not coalesce((not e.is_parked or e.pending = 'interrupted' and e.state in ('delayed', 'waiting_children'))
        and (e.stop_route is null or flowfabric.is_stopped(e) and e.pending = 'interrupted') and case
        when e.state in ('completed', 'failed', 'cancelled', 'expired', 'skipped') then
            num_nonnulls(e.blocking_reason, e.blocking_detail, e.pending, e.lease_lost, e.delay_until,
                         e.attempt_timeout_at, e.attempt_timeout_left) = 0 and not e.resume_pending
            and e.completed_at is not null
        when e.state = 'active' and e.lease_lost is null then
            num_nonnulls(e.blocking_reason, e.blocking_detail, e.pending, e.delay_until) = 0
            and not e.resume_pending
            and num_nulls(e.lease_id, e.worker, e.attempt_started_at, e.lease_expires_at,
                          e.attempt_id) = 0
        when e.state = 'active' then
            e.blocking_reason = 'waiting_for_worker' and e.blocking_detail <> '' and e.pending = 'interrupted'
            and not e.resume_pending and e.lease_lost_at is not null and e.lease_id is not null
        when e.state in ('waiting', 'resumable') then
            e.lease_lost is null and e.pending is not null and (e.delay_until is null) = (e.stop_route is null)
            and (e.state = 'resumable') = (e.resume_pending and e.blocking_reason = 'waiting_for_worker')
            and ((e.blocking_reason = 'waiting_for_worker' and e.blocking_detail is null)
                 or (e.blocking_reason in ('waiting_for_capable_worker', 'waiting_for_locality_match',
                         'paused_by_policy', 'paused_by_operator', 'paused_by_flow_cancel')
                     and e.blocking_detail <> ''))
        when e.state = 'delayed' then
            e.lease_lost is null and isfinite(e.delay_until) and e.blocking_detail <> ''
            and (e.blocking_reason, e.pending) in (
                ('waiting_for_delay', 'first'), ('waiting_for_delay', 'interrupted'),
                ('waiting_for_retry_backoff', 'retry'), ('waiting_for_resume_delay', 'interrupted'))
        when e.state = 'rate_limited' then
            e.lease_lost is null and e.pending is not null
            and e.blocking_reason in ('waiting_for_budget', 'waiting_for_quota')
        when e.state = 'waiting_children' then
            e.lease_lost is null and e.blocking_reason = 'waiting_for_children' and e.blocking_detail <> ''
            and e.pending is not null
        when e.state = 'suspended' then e.lease_lost is null and e.pending = 'interrupted'
    end, false)
$$;
