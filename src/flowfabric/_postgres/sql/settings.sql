-- Settings of functions. A migration applies them after it has created the functions; no function sets its own.
--
-- owner    Every function that runs with the owner's rights has a fixed search path, so that no object of a caller can
--          replace one of ours.
-- keyed    Hot calls that reach their rows by key, through arrays. The planner does not know how long the arrays are
--          and would hash or scan whole tables; one generic plan saves the planning of every call.
-- reads    Reads of a few executions by key: the same joins, but planned for the arguments at hand.
-- pages    Reads of one page in the order of an index: without it everything that follows would be read and sorted.
-- graph    Calls that walk a flow. Groups of a thousand edges need hash joins; bitmap scans read edges that are resolved.
-- streams  Appends and reads of streams. Frames are joined with their streams by a hash; the newest row of a stream is the
--          first of its index.
-- claim    The scan of a route must follow the index of ready rows, in its order, and stop early.
-- audit    Wide unions over small sets: compiling or planning them takes longer than running them.
-- log      Rules about all events: whatever the statistics say, they are joined by hash.
-- sample   The same rules for a few rows by key, and pages of reconcilers: a plan for whole tables would read them all.
-- ring     Emptying a segment of the event log, or of best-effort frames, gives up when a reader holds it.
do $settings$
declare
    v record;
begin
    for v in
        select f.name, g.settings, p.oid::regprocedure as function
        from (values
            ('keyed', array['plan_cache_mode = force_generic_plan', 'enable_hashjoin = off', 'enable_mergejoin = off',
                            'enable_seqscan = off', 'jit = off'],
                'block cancel cancel_as_operator change_priority check_admission claim_as_operator claim_granted complete complete_as_operator
                 create_executions create_one create_waitpoint delay delay_as_operator deliver_signal
                 deliver_signal_as_operator drop_frames drop_owned fail fail_as_operator find expire_suspension forget_usage fork_execution heartbeat_worker issue_claim_grant issue_reclaim_grant
                 mark_worker_dead open_wait park progress reclaim record_steps redact_execution refuse_signals register_worker release
                 release_admission release_as_operator renew replay resume_execution revoke_lease run_one settle_wait signal_by_key stop_changed submit_child suspend unblock unblock_limited count_denials unwatch
                 update_quota_policy verify_grant
                 wait_children wait_children_as_operator use_budgets report_usage_admin record_spend create_budget update_budget
                 bind_limit unbind_limit reset_budget release_budget reset_due_budgets collect_ended pause_for_budget
                 begin_answer create_api_key create_bulk finish_answer forget_answer note_api_key_use read_api_key read_executions revoke_api_key rotate_api_key
                 run_bulk stop_bulk'),
            ('reads', array['enable_hashjoin = off', 'enable_mergejoin = off', 'enable_seqscan = off', 'jit = off'],
                'find_ids find_limits find_unreported find_unserved read_held count_held read_denials run_timers list_expired_leases may_submit read_outcomes read_steps read_budgets find_budgets read_usage in_namespaces'),
            ('sample', array['plan_cache_mode = force_generic_plan', 'enable_hashjoin = off', 'enable_mergejoin = off',
                             'enable_seqscan = off', 'enable_bitmapscan = off', 'jit = off'],
                'audit_sample reconcile_budgets reconcile_quotas repair_floors'),
            ('graph', array['plan_cache_mode = force_generic_plan', 'enable_mergejoin = off', 'enable_seqscan = off',
                            'enable_bitmapscan = off', 'jit = off'],
                'add_to_flow apply_edge cancel_children cancel_flow_header cancel_members cancel_siblings dispatch_cascades grow_flow
                 promote_blocked reconcile_edges resolve_dependency stage_edges submit_child_flow'),
            ('streams', array['plan_cache_mode = force_generic_plan', 'enable_mergejoin = off', 'enable_seqscan = off',
                              'enable_bitmapscan = off', 'jit = off'],
                'append_frames read_last_frames read_stream_summary read_streams'),
            ('claim', array['plan_cache_mode = force_generic_plan', 'enable_hashjoin = off', 'enable_mergejoin = off',
                            'enable_seqscan = off', 'enable_bitmapscan = off', 'enable_sort = off', 'jit = off'],
                'claim claim_for_worker claim_lanes'),
            ('pages', array['enable_hashjoin = off', 'enable_mergejoin = off', 'enable_seqscan = off', 'enable_bitmapscan = off',
                            'enable_sort = off', 'jit = off'],
                'list_consumers list_children list_failures list_flows list_held list_partition list_waits read_members list_worker_events list_workers look_for_due next_due read_events read_gauges scan_eligible
                 trim_worker_events list_bindings list_budgets list_spend list_api_keys list_bulk list_operator_audit'),
            ('audit', array['plan_cache_mode = force_generic_plan', 'jit = off'], 'audit'),
            ('log', array['enable_nestloop = off', 'jit = off'], 'audit_log'),
            ('ring', array['lock_timeout = ''200ms'''], 'trim_events trim_live')
        ) as g (name, settings, functions)
        cross join lateral regexp_split_to_table(g.functions, '\s+') as f (name)
        left join pg_proc p on p.pronamespace = 'flowfabric'::regnamespace and p.proname = f.name
        union all
        select p.proname, array['search_path = flowfabric, pg_temp'], p.oid::regprocedure
        from pg_proc p where p.pronamespace = 'flowfabric'::regnamespace and p.prosecdef
    loop
        if v.function is null then
            raise exception 'settings for a function that does not exist: %', v.name;
        end if;
        for i in 1 .. cardinality(v.settings) loop
            execute format('alter function %s set %s', v.function, v.settings[i]);
        end loop;
    end loop;
end;
$settings$;
