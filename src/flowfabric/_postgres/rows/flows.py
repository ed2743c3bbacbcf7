"""Flows, their edges and edge groups, and their summaries."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from flowfabric._postgres.rows.values import Row, json_of, one_of, readable
from flowfabric.errors import Corruption
from flowfabric.values.flow import (
    CancellationPolicy,
    EdgeGroup,
    EdgeSnapshot,
    FlowInfo,
    FlowSnapshot,
    FlowState,
    FlowStatus,
    FlowSummary,
    GroupState,
)
from flowfabric.values.found import FoundId
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from flowfabric.values.state import State

_GROUP = (
    "downstreams", "policies", "ks", "cancel_rests", "ns", "succeededs", "faileds", "skippeds", "states",
    "satisfied_ats",
)  # fmt: skip
_BUCKETS = (
    "completed", "failed", "cancelled", "expired", "skipped", "active", "suspended", "waiting", "delayed",
    "rate_limited", "waiting_children",
)  # fmt: skip


@readable
def flow_snapshot(row: Row, partition: int) -> FlowSnapshot:
    """The header of a flow with its groups."""
    groups = [] if row["downstreams"] is None else list(zip(*(row[name] for name in _GROUP), strict=True))
    tags = json_of(row, "tags") or {}
    policy = None if row["cancellation_policy"] is None else one_of(CancellationPolicy, row, "cancellation_policy")
    return FlowSnapshot(
        flow_id=FlowId(row["flow_id"]),
        flow_kind=row["flow_kind"],
        namespace=row["namespace"],
        public_flow_state=row["state"],
        graph_revision=row["node_count"] + row["edge_count"],
        node_count=row["node_count"],
        edge_count=row["edge_count"],
        created_at=row["created_at"],
        last_mutation_at=row["last_mutation_at"],
        cancelled_at=row["cancelled_at"],
        cancel_reason=row["cancel_reason"],
        cancellation_policy=policy,
        tags={key: tags[key] for key in sorted(tags)},
        edge_groups=tuple(_group(*group) for group in groups),
        parent_id=None if row["parent_id"] is None else ExecutionId(row["parent_id"]),
    )


def _group(
    downstream: UUID,
    policy: str,
    k: int | None,
    cancel_rest: bool,
    n: int,
    succeeded: int,
    failed: int,
    skipped: int,
    state: str,
    satisfied_at: datetime | None,
) -> EdgeGroup:
    try:
        found, known = GroupState(state), _policy(policy, k, cancel_rest)
    except ValueError:
        raise Corruption(f"the edge group of {downstream}: {state!r}, {policy!r}") from None
    return EdgeGroup(
        downstream_execution_id=ExecutionId(downstream),
        policy=known,
        total_deps=n,
        satisfied_count=succeeded,
        failed_count=failed,
        skipped_count=skipped,
        running_count=n - succeeded - failed - skipped,
        group_state=found,
        satisfied_at=satisfied_at,
    )


def _policy(kind: str, k: int | None, cancel_rest: bool) -> EdgeGroupPolicy:
    rest = OnSatisfied.CANCEL_REMAINING if cancel_rest else OnSatisfied.LET_RUN
    match kind:
        case "all_of":
            return AllOf()
        case "any_of":
            return AnyOf(rest)
        case "quorum" if k is not None:
            return Quorum(k, rest)
        case "all_settled":
            return AllSettled()
    raise ValueError


@readable
def flow_info(row: Row) -> FlowInfo:
    """What lists show of a flow."""
    status = _status(row["state"], row["summary"])
    state = "cancelled" if status is FlowStatus.CANCELLED else row["summary"] or row["state"]
    return FlowInfo(
        flow_id=FlowId(row["flow_id"]),
        created_at=row["created_at"],
        status=status,
        state=None if status is FlowStatus.UNKNOWN else FlowState(state),
        flow_kind=row["flow_kind"],
        namespace=row["namespace"],
        node_count=row["node_count"],
    )


@readable
def found_id(row: Row) -> FoundId:
    """An execution or flow found by a part of its id."""
    return FoundId(
        id=row["id"],
        what="flow" if row["is_flow"] else "execution",
        kind=row["kind"],
        state=_status(row["state"], row["summary"]) if row["is_flow"] else one_of(State, row, "state"),
        created_at=row["created_at"],
    )


def _status(state: str, summary: str | None) -> FlowStatus:
    """The state of a flow: the one it was given, or the one that follows from the last count of its members."""
    if state == "cancelled":
        return FlowStatus.CANCELLED
    return {
        "completed": FlowStatus.COMPLETED,
        "failed": FlowStatus.FAILED,
        "open": FlowStatus.ACTIVE,
        "running": FlowStatus.ACTIVE,
        "blocked": FlowStatus.ACTIVE,
        "cancelled": FlowStatus.ACTIVE,
    }.get(summary or state, FlowStatus.UNKNOWN)


@readable
def flow_summary(row: Row) -> FlowSummary:
    """The counts of a flow's members, as last counted."""
    counts = {f"members_{name}": row[name] for name in _BUCKETS}
    total = sum(counts.values())
    return FlowSummary(
        flow_id=FlowId(row["flow_id"]),
        total_members=total,
        sampled_members=total,
        public_flow_state=one_of(FlowState, row, "state"),
        last_summary_update_at=row["updated_at"],
        **counts,
    )


@readable
def edge(row: Row, flow_id: FlowId) -> EdgeSnapshot:
    return EdgeSnapshot(
        edge_id=row["edge_id"],
        flow_id=flow_id,
        upstream_execution_id=ExecutionId(row["upstream"]),
        downstream_execution_id=ExecutionId(row["downstream"]),
        data_passing_ref=row["data_passing_ref"],
        edge_state="pending" if row["applied_at"] is None else "applied",
        created_at=row["created_at"],
    )
