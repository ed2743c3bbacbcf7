"""Waitpoints, suspensions, signals, and the waits of handlers."""

from __future__ import annotations

from typing import Any

from flowfabric._postgres.rows.values import Row, json_of, readable
from flowfabric.values.ids import ExecutionId
from flowfabric.values.signal import ReceivedSignal, RecordedSignal
from flowfabric.values.wait import (
    BoundWaitpoint,
    OpenWait,
    PendingWaitpoint,
    SuspendedExecution,
    Suspension,
    SuspensionDetails,
    Wait,
    WaitpointToken,
    WaitResult,
)


@readable
def pending_waitpoint(row: Row, execution_id: ExecutionId) -> PendingWaitpoint:
    """A waitpoint that accepts signals."""
    return PendingWaitpoint(
        waitpoint_id=row["waitpoint_id"],
        waitpoint_key=row["waitpoint_key"],
        state=row["state"],
        required_signal_names=tuple(row["required_signal_names"]),
        created_at=row["created_at"],
        activated_at=row["activated_at"],
        expires_at=row["expires_at"],
        execution_id=execution_id,
        token_kid=row["token_kid"],
        token_fingerprint=row["token_fingerprint"] or "",
    )


def _bound(row: Row) -> tuple[BoundWaitpoint, ...]:
    return tuple(
        BoundWaitpoint(waitpoint_id, key, WaitpointToken(token))
        for waitpoint_id, key, token in zip(row["waitpoint_ids"], row["waitpoint_keys"], row["tokens"], strict=True)
    )


@readable
def suspension_details(row: Row) -> SuspensionDetails:
    """The result of a call that suspended."""
    first, *others = _bound(row)
    return SuspensionDetails(
        suspension_id=row["suspension_id"],
        waitpoint_id=first.waitpoint_id,
        waitpoint_key=first.waitpoint_key,
        waitpoint_token=first.waitpoint_token,
        additional_waitpoints=tuple(others),
    )


@readable
def suspension(row: Row, execution_id: ExecutionId) -> Suspension:
    """A stored suspension."""
    return Suspension(
        suspension_id=row["suspension_id"],
        execution_id=execution_id,
        attempt_index=row["attempt_index"],
        waitpoint_ids=tuple(row["waitpoint_ids"]),
        waitpoint_keys=tuple(row["waitpoint_keys"]),
        reason_code=row["reason_code"],
        requested_by=row["requested_by"],
        continuation_metadata_pointer=row["continuation_metadata_pointer"],
        resume_condition=json_of(row, "resume_condition"),
        resume_policy=json_of(row, "resume_policy"),
        suspended_at=row["suspended_at"],
        timeout_at=row["timeout_at"],
        timeout_behavior=row["timeout_behavior"],
        last_signal_at=row["last_signal_at"],
        satisfied_at=row["satisfied_at"],
        closed_at=row["closed_at"],
        close_reason=row["close_reason"],
        trigger_type=row["trigger_type"],
        closer_signal_id=row["closer_signal_id"],
        satisfier_signal_ids=tuple(row["satisfier_signal_ids"] or ()),
    )


@readable
def suspended_execution(row: Row) -> SuspendedExecution:
    return SuspendedExecution(
        execution_id=ExecutionId(row["id"]),
        suspended_at=row["suspended_at"],
        reason=row["reason_code"],
        timeout_at=row["timeout_at"],
    )


def _signal_fields(row: Row) -> dict[str, Any]:
    return {
        "signal_id": row["signal_id"],
        "signal_name": row["signal_name"],
        "signal_category": row["signal_category"],
        "source_type": row["source_type"],
        "source_identity": row["source_identity"],
        "correlation_id": row["correlation_id"],
        "accepted_at": row["accepted_at"],
        "payload": row["payload"],
        "payload_encoding": row["payload_encoding"],
        "waitpoint_key": row["waitpoint_key"],
    }


@readable
def received_signal(row: Row) -> ReceivedSignal:
    """A signal that ended a suspension."""
    return ReceivedSignal(**_signal_fields(row))


@readable
def recorded_signal(row: Row) -> RecordedSignal:
    """A signal and its effect."""
    return RecordedSignal(
        ordinal=row["ordinal"],
        waitpoint_id=row["waitpoint_id"],
        suspension_id=row["suspension_id"],
        target_scope=row["target_scope"],
        created_at=row["created_at"],
        observed_effect=row["observed_effect"],
        match_detail=row["match_detail"],
        refused=row["refused"],
        **_signal_fields(row),
    )


@readable
def wait(row: Row) -> Wait:
    """A waitpoint that accepts signals, with the execution that waits there."""
    return Wait(
        execution_id=ExecutionId(row["id"]),
        execution_kind=row["kind"],
        lane_id=row["lane"],
        namespace=row["namespace"],
        waitpoint_id=row["waitpoint_id"],
        waitpoint_key=row["waitpoint_key"],
        state=row["state"],
        reason=row["reason_code"],
        since=row["created_at"],
        timeout_at=row["timeout_at"],
        timeout_behavior=row["timeout_behavior"],
        required_signal_names=tuple(row["required_signal_names"]),
        signal_count=row["signal_count"],
        refused_signal_count=row["refused_signal_count"],
    )


@readable
def open_wait(row: Row, use: int) -> OpenWait:
    """The waitpoints of a handler's wait."""
    return OpenWait(use=use, waitpoints=_bound(row), deadline=row["at"])


@readable
def wait_result(row: Row) -> WaitResult:
    """The state of a handler's wait."""
    return WaitResult(outcome=row["outcome"], result=row["result"], seen=tuple(row["seen"]))
