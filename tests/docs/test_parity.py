"""The parity page names every operation of the reference system, and only calls that exist."""

from __future__ import annotations

import re

import pytest

import flowfabric as ff
from flowfabric import middleware
from flowfabric.server.operations import OPERATIONS
from tests.docs.pages import ROOT

REFERENCE_NAMES = {
    "Lifecycle": """
        create_execution claim claim_execution issue_claim_grant issue_grant_and_claim claim_from_resume_grant
        claim_resumed_execution renew renew_lease progress complete complete_execution fail fail_execution delay
        wait_children cancel cancel_execution revoke_lease issue_reclaim_grant reclaim_execution replay_execution
        change_priority""",
    "Reads": """
        describe_execution read_execution_state read_execution_info read_execution_context get_execution_result
        read_current_attempt_index read_total_attempt_count read_exec_core_fields list_executions list_suspended
        list_lanes resolve_execution_flow_id set_execution_tag get_execution_tag get_execution_namespace""",
    "Background and service": """
        mark_lease_expired_if_due promote_delayed expire_execution trim_retention reconcile_execution_index
        server_time_ms ping prepare shutdown_prepare capabilities backend_label""",
    "Suspension and signals": """
        suspend suspend_by_triple create_waitpoint close_waitpoint read_waitpoint_token list_pending_waitpoints
        observe_signals deliver_signal deliver_approval_signal resume_execution expire_suspension
        seed_waitpoint_hmac_secret rotate_waitpoint_hmac_secret_all""",
    "Flows": """
        create_flow add_execution_to_flow stage_dependency_edge apply_dependency_to_child set_edge_group_policy
        resolve_dependency cascade_completion evaluate_flow_eligibility describe_flow describe_edge list_edges
        list_flows set_flow_tag get_flow_tag cancel_flow cancel_flow_header ack_cancel_member project_flow_summary
        drain_sibling_cancel_group reconcile_sibling_cancel_group""",
    "Scheduling": """
        claim_for_worker scan_eligible_executions block_route block_execution_for_admission unblock_execution
        create_budget reset_budget get_budget_status report_usage report_usage_admin record_spend release_budget
        read_budget_usage_and_limits reconcile_budget_counters create_quota_policy check_admission
        release_admission read_quota_policy_limits reconcile_quota_counters register_worker heartbeat_worker
        mark_worker_dead list_workers list_expired_leases""",
    "Streams and events": """
        append_frame read_stream tail_stream read_summary subscribe_completion subscribe_lease_history
        subscribe_signal_delivery subscribe_instance_tags""",
    "Worker library": """
        claim_via_server claim_from_grant claim_from_resume_grant claim_from_reclaim_grant claim_next complete fail
        cancel delay_execution move_to_waiting_children suspend try_suspend try_suspend_on_pending renew_lease
        update_progress append_frame append_frame_with_mode report_usage create_pending_waitpoint resume_signals
        read_stream tail_stream is_lease_healthy consecutive_renewal_failures on data max_concurrent backoff run
        TracingLayer RateLimitLayer MetricsLayer CircuitBreakerLayer verify_and_deliver""",
    "Client library": """
        submit inspect result read_context cancel deliver_signal claim_for_worker issue_reclaim_grant
        read_waitpoint_token rotate_waitpoint_secret""",
}
PAGE = (ROOT / "docs" / "reference" / "parity.md").read_text(encoding="utf-8")
_OWNERS = {
    **{cls.__name__: cls for cls in (ff.Engine, ff.App, ff.Task, ff.Worker, ff.Context, ff.AsyncClient, ff.Run)},
    "middleware": middleware,
}
_CALL = re.compile(rf"`({'|'.join(_OWNERS)})\.(\w+)`")


def _rows(section: str) -> dict[str, str]:
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, flags=re.MULTILINE)
    assert len(dict(found)) == len(found), "a name has two rows"
    return dict(found)


@pytest.mark.parametrize("section", REFERENCE_NAMES)
def test_every_name_of_the_reference_has_one_row(section: str) -> None:
    assert list(_rows(section)) == REFERENCE_NAMES[section].split()


def test_every_call_the_page_names_exists() -> None:
    calls = _CALL.findall(PAGE)
    assert len(calls) > 80
    assert [f"{owner}.{call}" for owner, call in calls if not hasattr(_OWNERS[owner], call)] == []


@pytest.mark.parametrize("section", REFERENCE_NAMES)
def test_a_row_names_a_call_or_says_why_there_is_none(section: str) -> None:
    unexplained = {
        name: here
        for name, here in _rows(section).items()
        if not here.startswith((*(f"`{owner}" for owner in _OWNERS), "not needed: "))
    }
    assert unexplained == {}


def test_the_capabilities_are_what_exists() -> None:
    supports = ff.Engine.capabilities()["supports"]
    other_names = {
        "cancel_execution",
        "cancel_flow_wait_timeout",
        "cancel_flow_wait_indefinite",
        "stream_durable_summary",
        "stream_best_effort_live",
        "budget_admin",
        "quota_admin",
    }
    assert {name for name, there in supports.items() if there != hasattr(ff.Engine, name)} == other_names
    assert all(supports[name] for name in other_names)


def test_every_route_of_the_reference_leads_to_an_operation_of_the_server() -> None:
    text = PAGE.split("\n## HTTP routes\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| `([A-Z]+ [^`]+)` \| `([A-Z]+ [^`]+)` \|$", text, flags=re.MULTILINE)
    table = {f"{one.method} {one.path}" for one in OPERATIONS}
    assert len(dict(found)) == len(found) == 29
    for theirs, ours in found:
        assert ours in table, ours
        assert re.sub(r"\{\w+\}", "{}", theirs) == re.sub(r"\{\w+\}", "{}", ours)
