-- audit_sample: the same for a few executions and flows of one partition, chosen at random
--
-- Called by the audit duty. Every rule here reaches its rows by key, so the cost depends on p_limit and not on what is
-- stored; rules about queues, timers and events need whole tables and are left to audit.
-- Takes    p_limit: how many executions at most.
-- Locks    nothing.
-- Returns  one row per violation.
-- Roles    work, operate
create or replace function flowfabric.audit_sample(p_partition integer, p_limit integer)
returns table (rule text, partition integer, id uuid, detail text)
language plpgsql volatile security definer as $$
#variable_conflict use_column
declare
    v_now timestamptz := flowfabric.now();
    v_first uuid;
    v_last uuid;
    v_from uuid;
    v_to uuid;
begin
    select e.id into v_first from flowfabric.execution e where e.partition = p_partition order by e.id limit 1;
    select e.id into v_last from flowfabric.execution e where e.partition = p_partition order by e.id desc limit 1;
    if v_first is null then
        return;
    end if;
    -- Ids begin with the time they were made at: any moment between the first and the last.
    v_from := (lpad(to_hex(flowfabric.id_time(v_first)
                           + floor(random() * (flowfabric.id_time(v_last) - flowfabric.id_time(v_first) + 1))::bigint), 12, '0')
               || '00000000000000000000')::uuid;
    select x.id into v_to
    from (select e.id from flowfabric.execution e where e.partition = p_partition and e.id >= v_from
          order by e.id limit p_limit) x
    order by x.id desc limit 1;
    v_to := coalesce(v_to, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
    return query
    select * from flowfabric.audit_state_facts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_partition_of_id(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_facts_known(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_completed_at(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_pending_agrees_with_attempts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_times_ordered(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_worker_known(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_ready_row(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_blocked_row(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_unsuccessful_row(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_attempt_history(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_attempt_open(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_attempt_history_ended(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_attempt_orphan(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_attempt_identity(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_epoch_order(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_reclaims_counted(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_retries_counted(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_step_orphan(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_child_partition(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_child_row(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_child_forgotten(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_frame_orphan(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_frame_counts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_summary_version(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_suspension_open(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_suspension_facts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_suspension_waitpoints(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_waitpoint_state(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_condition_held(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_condition_counts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_satisfier_unknown(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_signal_order(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_signal_count(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_grant_state(p_partition, p_partition, v_from, v_to, v_now)
    union all select * from flowfabric.audit_flow_counts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_flow_header(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_flow_grew_closed(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_flow_missing(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_edge_ends(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_graph_acyclic(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_edge_facts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_edge_without_group(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_group_counts(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_group_policy(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_group_decision(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_group_satisfied_at(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_held_back(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_impossible_alive(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_skipped_group(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_input_row(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_edge_forgotten(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_edge_ahead(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_sibling_row(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_sibling_flag(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_sibling_forgotten(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_cancel_owed(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_cancel_backlog(p_partition, p_partition, v_from, v_to)
    union all select * from flowfabric.audit_cancel_forgotten(p_partition, p_partition, v_from, v_to);
end;
$$;
