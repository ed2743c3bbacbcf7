-- audit: the invariants of every execution and every flow, as queries that find violations
--
-- Each rule is a file of this folder: a sentence, and the query that finds violations. A rule may be behind for a while
-- (cascades, cancels, summaries) if a row says what is still to be done. For people and tests, for one partition or all
-- (p_partition null): its cost grows with what is stored. The duty calls audit_sample. Repairs nothing.
-- Takes    p_events: check the event log too; counts of events are valid within its retention.
-- Locks    nothing.
-- Returns  one row per violation: the rule, and the execution, or the flow or edge if the rule is about one.
-- Roles    operate
create or replace function flowfabric.audit(p_partition integer, p_events boolean)
returns table (rule text, partition integer, id uuid, detail text)
language plpgsql stable security definer as $$
declare
    v_now timestamptz := flowfabric.now();
    -- As a range, both cases share one plan that follows the keys, so that a session plans once.
    v_low integer := coalesce(p_partition, 0);
    v_high integer := coalesce(p_partition, 65535);
    v_from constant uuid := flowfabric.zero_uuid();
    v_to constant uuid := 'ffffffff-ffff-ffff-ffff-ffffffffffff';
begin
    return query select * from flowfabric.audit_by_key(v_low, v_high, v_from, v_to, v_now);

    -- The rules that need whole tables.
    return query
    select * from flowfabric.audit_times_finite(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_lane_registered(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_derived_route(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_limit_set(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_limit_binding(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_ready_orphan(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_ready_below_floor(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_blocked_orphan(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_blocked_limit(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_limit_open(v_low, v_high, v_from, v_to, v_now)
    union all select * from flowfabric.audit_quota_slot(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_quota_slot_missing(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_quota_cap(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_quota_rate(v_low, v_high, v_from, v_to, v_now)
    union all select * from flowfabric.audit_tag_rows(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_timers(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_timer_waitpoint(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_waits_for_nothing(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_waiter_missed(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_keystore(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_budget_limits(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_budget_held(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_budget_mark(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_budget_counters(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_budget_ledger(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_budget_rows(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_registration_facts(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_verdict_facts(v_low, v_high, v_from, v_to, v_now)
    union all select * from flowfabric.audit_grant_hides(v_low, v_high, v_from, v_to, v_now)
    union all select * from flowfabric.audit_cascade_row(v_low, v_high, v_from, v_to)
    union all select * from flowfabric.audit_flow_summary(v_low, v_high, v_from, v_to);

    if p_events then
        return query select * from flowfabric.audit_log(v_low, v_high, v_from, v_to);
    end if;
end;
$$;

-- audit_log: the rules about the event log. They join all events with all executions, and are planned for that.
create or replace function flowfabric.audit_log(p_low integer, p_high integer, p_from uuid, p_to uuid)
returns setof flowfabric.violation
language plpgsql stable as $$
begin
    return query
    select * from flowfabric.audit_completion_events(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_log_epochs(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_worker_history(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_last_outcome(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_replayed_events(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_lease_epochs(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_lease_history(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_leased_last_event(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_signal_events(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_event_namespace(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_event_route(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_event_worker(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_edge_event(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_cascade_event(p_low, p_high, p_from, p_to)
    union all select * from flowfabric.audit_cancel_requested_event(p_low, p_high, p_from, p_to);
end;
$$;
