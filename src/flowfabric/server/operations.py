"""The table of operations: everything that `/v1` offers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from flowfabric.server.operation import ROUTES, Operation

_CHAPTERS: Final = (
    "executions", "control", "bulk", "waits", "links", "flows", "lanes", "schedules", "budgets", "quotas", "streams",
    "events", "consumers", "workers", "admin", "failures", "outside",
)  # fmt: skip


def _all() -> tuple[Operation, ...]:
    found: list[Operation] = []
    for chapter in _CHAPTERS:
        found += import_module(f"{ROUTES}.{chapter}").OPERATIONS
    return tuple(found)


OPERATIONS: Final[tuple[Operation, ...]] = _all()
BY_NAME: Final[Mapping[str, Operation]] = {one.name: one for one in OPERATIONS}

# Operations of `Engine` that no route offers, by the reason.
_LEFT_OUT: Final[Mapping[str, str]] = {
    "needs a lease: the protocol of workers": """
        append_frame append_frames cancel_reservation claim claim_execution claim_from_resume_grant claim_lanes
        claim_many claim_resumed_execution close_waitpoint complete complete_many count_emitted create_waitpoint
        delay fail fail_many heartbeat_own heartbeat_worker leave_registry mark_worker_dead observe_signals
        open_wait park pause_for_budget progress read_declared_limits read_started reclaim_execution
        record_steps refuse_signals register_worker release renew renew_and_heartbeat renew_many report_usage
        report_usage_many reserve_usage settle_usage settle_wait sleep_and_heartbeat sleep_for_work stop_changed
        submit_child submit_child_flow suspend suspend_by_triple suspend_on use_budgets verify_grant
        wait_children work_wakeups""",
    "a round of a duty, or a part of one": """
        audit_sample count_denials cancel_children cancel_siblings cascade_completion collect_reservations
        dispatch_cascades dispatch_completion drain_sibling_cancel_group due_schedules expire_execution
        expire_suspension expire_waitpoint find_unreported_budgets fire_schedule judge_routes leave_lead
        list_leaders list_running_bulk list_sibling_cancels look_for_due lost_wakeups mark_lease_expired_if_due
        next_due project_flow_summaries project_flow_summary promote_blocked_to_eligible promote_delayed
        reconcile_budget_counters reconcile_cancellations reconcile_edges reconcile_quotas
        reconcile_sibling_cancel_group repair_floors reset_due_budgets resolve_dependency run_bulk run_timers
        submit_hooks sweep sweep_workers take_lead timer_wakeups trim_retention trim_worker_events
        unblock_limited until_next_schedule ack_cancel_member evaluate_flow_eligibility""",
    "of a process: its connections, its clock, what it waits for": """
        attach backend_label close connect detach event_wakeups ping prepare server_time_ms shutdown_prepare
        sleep_for_events take_told""",
    "what the server itself is made of": """
        acting begin_answer finish_answer forget_answer in_namespaces note_api_key_use read_api_key read_gauges
        roll_back verify_api_key write_operator_audit""",
    "for ports of FlowFabric in Rust; another operation has it and more": """
        describe_edge get_execution_namespace get_execution_tag get_flow_tag issue_claim_grant
        issue_grant_and_claim list_executions list_suspended list_waitpoint_hmac_kids read_cancel_backlog
        read_current_attempt_index read_exec_core_fields read_suspension read_total_attempt_count
        resolve_execution_flow_id scan_eligible_executions seek_events set_flow_tag""",
    "many at once: a route has it for one, or `/v1/bulk` for all that match": """
        add_executions_to_flow cancel_many read_executions""",
    "of the command line and the client library, which read the database": """
        audit count_events count_held find_id find_limits find_unserved free_key list_bindings list_children
        list_held list_quota_keys list_uncovered list_versions list_worker_events read_denials read_held""",
    "declared in the app's code": "bind_limit note_declared_limits unbind_limit",
    "a consumer runs in the process that consumes; over HTTP `/v1/events` is followed": """
        consume delete_consumer fail_consumer leave_consumer register_consumer set_consumer""",
    "only the owner of the schema may install the first signing key": "seed_waitpoint_hmac_secret",
}
NOT_BEHIND_HTTP: Final[Mapping[str, str]] = {
    name: reason for reason, names in _LEFT_OUT.items() for name in names.split()
}
