"""Database rows to records: one module per chapter, all available as `rows.<record>`."""

from __future__ import annotations

from flowfabric._postgres.rows.budgets import budget, execution_usage, spend, usage_answer
from flowfabric._postgres.rows.claims import claimed, started
from flowfabric._postgres.rows.events import event
from flowfabric._postgres.rows.executions import (
    attempt,
    cancelled,
    child,
    context,
    execution,
    expired_lease,
    info,
    outcome,
    snapshot,
)
from flowfabric._postgres.rows.flows import edge, flow_info, flow_snapshot, flow_summary, found_id
from flowfabric._postgres.rows.lanes import lane, lane_stats
from flowfabric._postgres.rows.limits import binding, held
from flowfabric._postgres.rows.quotas import quota_key, quota_policy
from flowfabric._postgres.rows.schedules import due_schedule, schedule
from flowfabric._postgres.rows.server import api_key, audit_entry, bulk_job, failure_group, stored_api_key
from flowfabric._postgres.rows.steps import step
from flowfabric._postgres.rows.streams import appended, frame, stream_pages, stream_summary
from flowfabric._postgres.rows.values import Row, decode_json
from flowfabric._postgres.rows.verdicts import FOR_ALL, by_place, refused
from flowfabric._postgres.rows.waits import (
    open_wait,
    pending_waitpoint,
    received_signal,
    recorded_signal,
    suspended_execution,
    suspension,
    suspension_details,
    wait,
    wait_result,
)
from flowfabric._postgres.rows.workers import leader, live_version, uncovered, unserved, worker, worker_event

__all__ = [
    "FOR_ALL",
    "Row",
    "api_key",
    "appended",
    "attempt",
    "audit_entry",
    "binding",
    "budget",
    "bulk_job",
    "by_place",
    "cancelled",
    "child",
    "claimed",
    "context",
    "decode_json",
    "due_schedule",
    "edge",
    "event",
    "execution",
    "execution_usage",
    "expired_lease",
    "failure_group",
    "flow_info",
    "flow_snapshot",
    "flow_summary",
    "found_id",
    "frame",
    "held",
    "info",
    "lane",
    "lane_stats",
    "leader",
    "live_version",
    "open_wait",
    "outcome",
    "pending_waitpoint",
    "quota_key",
    "quota_policy",
    "received_signal",
    "recorded_signal",
    "refused",
    "schedule",
    "snapshot",
    "spend",
    "started",
    "step",
    "stored_api_key",
    "stream_pages",
    "stream_summary",
    "suspended_execution",
    "suspension",
    "suspension_details",
    "uncovered",
    "unserved",
    "usage_answer",
    "wait",
    "wait_result",
    "worker",
    "worker_event",
]
