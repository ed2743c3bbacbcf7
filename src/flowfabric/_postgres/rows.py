"""Database row to record, nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from flowfabric._postgres.refusals import refusal
from flowfabric.errors import Corruption, FlowFabricError
from flowfabric.values.attempt import Attempt, AttemptType, Claimed, CurrentAttempt, Passed
from flowfabric.values.event import Event, EventCursor
from flowfabric.values.execution import Execution, ExecutionInfo, ExecutionSnapshot
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import CurrentLease, Handle, HandleKind
from flowfabric.values.schedule import Schedule
from flowfabric.values.state import State
from flowfabric.values.step import Step
from flowfabric.values.vector import project

Row = Mapping[str, Any]

_json = msgspec.json.Decoder()
_HANDLE_KINDS = {kind.value: kind for kind in HandleKind}
_ATTEMPT_TYPES = {kind.value: kind for kind in AttemptType}


def decode_json(text: str | None) -> Any:
    return None if text is None else _json.decode(text)


CLAIMED = (
    "partition, id, handle_kind, attempt_index, attempt_id, attempt_type, lease_id, lease_epoch, lease_expires_at,"
    " lane, kind, namespace, flow_id, priority, created_at, payload, payload_encoding, tags, deadline_at, "
    " attempt_timeout_at, retries, reclaims, replays, upstreams, upstream_states, upstream_results, upstream_encodings"
)


def claimed(row: Iterable[Any], ttl: timedelta, instance: str) -> Claimed:
    """A lease from the columns `CLAIMED`, in that order: unpacked by place, because this is the hot path."""
    (
        partition, uuid, handle_kind, attempt_index, attempt_id, attempt_type, lease_id, lease_epoch, lease_expires_at,
        lane, kind, namespace, flow_id, priority, created_at, payload, payload_encoding, tags, deadline_at,
        attempt_timeout_at, retries, reclaims, replays, upstreams, states, results, encodings,
    ) = row  # fmt: skip
    return Claimed(
        handle=Handle(
            partition=partition,
            uuid=uuid,
            attempt_index=attempt_index,
            attempt_id=attempt_id,
            lease_id=lease_id,
            lease_epoch=lease_epoch,
            lease_ttl=ttl,
            lane_id=lane,
            worker_instance_id=instance,
            kind=_HANDLE_KINDS[handle_kind],
        ),
        lease_expires_at=lease_expires_at,
        attempt_type=_ATTEMPT_TYPES[attempt_type],
        execution_kind=kind,
        namespace=namespace,
        flow_id=flow_id,
        priority=priority,
        created_at=created_at,
        input_payload=payload,
        payload_encoding=payload_encoding,
        tags={} if tags is None else _json.decode(tags),
        deadline_at=deadline_at,
        attempt_timeout_at=attempt_timeout_at,
        retry_count=retries,
        reclaim_count=reclaims,
        replay_count=replays,
        inputs=None
        if upstreams is None
        else {
            upstream: Passed(State(state), result, encoding)
            for upstream, state, result, encoding in zip(
                upstreams, states or (), results or (), encodings or (), strict=True
            )
        },
    )


def refused(row: Row, execution_id: ExecutionId) -> FlowFabricError:
    """The exception a verdict stands for."""
    code, detail = row["code"], row["detail"] or ""
    if code == "execution_not_active":
        state = State(row["state"])
        return refusal(
            code,
            detail,
            execution_id=execution_id,
            terminal_outcome=state.outcome.value,
            lease_epoch=str(row["lease_epoch"]),
            lifecycle_phase=_phase(state),
            attempt_id="" if row["attempt_id"] is None else str(row["attempt_id"]),
        )
    if code == "invalid_input":
        problem, field = _PROBLEMS.get(detail, (detail, None))
        return refusal(code, problem, execution_id=execution_id, field=field)
    return refusal(code, detail, execution_id=execution_id)


_PROBLEMS = {
    "lane_id": ("not the lane of the execution", "lane_id"),
    "used_id": ("an attempt of this execution already has it", "lease_id or attempt_id"),
    "worker_id": ("the grant belongs to another worker", "worker_id"),
    "fence_required": ("fence_required", "authority"),
    "partial_fence_triple": ("partial_fence_triple", "authority"),
}


def _phase(state: State) -> str:
    if state.is_terminal:
        return "terminal"
    return {State.ACTIVE: "active", State.SUSPENDED: "suspended"}.get(state, "runnable")


def execution(row: Row) -> Execution:
    try:
        state = State(row["state"])
    except ValueError:
        raise Corruption(f"unknown state {row['state']!r}") from None
    leased = state is State.ACTIVE
    lease = None
    if leased:
        lease = CurrentLease(
            lease_id=row["lease_id"],
            lease_epoch=row["epoch"],
            worker_id=row["worker_id"],
            worker_instance_id=row["worker_instance_id"],
            acquired_at=row["lease_acquired_at"],
            expires_at=row["lease_expires_at"],
            renewal_deadline=row["lease_renewed_at"] + timedelta(milliseconds=row["lease_ttl_ms"] * 2 // 3),
            attempt_index=row["attempt_index"],
            last_heartbeat_at=row["lease_renewed_at"],
        )
    # Once a retry is scheduled the failed attempt is no longer the current one; its index stays.
    has_attempt = row["attempt_id"] is not None and row["pending"] != "retry"
    return Execution(
        execution_id=ExecutionId.of(row["partition"], row["id"]),
        namespace=row["namespace"],
        lane_id=row["lane"],
        execution_kind=row["kind"],
        creator_identity=row["creator"],
        flow_id=row["flow_id"],
        idempotency_key=row["idempotency_key"],
        payload_encoding=row["payload_encoding"],
        tags=decode_json(row["tags"]) or {},
        policy=decode_json(row["policy"]),
        required_capabilities=tuple(row["capabilities"]),
        budget_ids=tuple(row["budget_ids"] or ()),
        quota_policy_id=row["quota_policy_id"],
        priority=row["priority"],
        public_state=state,
        stored_blocking_reason=row["blocking_reason"],
        blocking_detail=row["blocking_detail"],
        pending=row["pending"],
        resume_pending=row["resume_pending"],
        lease_lost=row["lease_lost"],
        total_attempt_count=row["attempts"],
        retry_count=row["retries"],
        replay_count=row["replays"],
        lease_reclaim_count=row["reclaims"],
        current_lease_epoch=row["epoch"],
        current_attempt=CurrentAttempt(row["attempt_id"], row["attempt_index"]) if has_attempt else None,
        current_attempt_index=row["attempt_index"],
        current_lease=lease if row["lease_lost"] is None else None,
        lost_lease=lease if row["lease_lost"] is not None else None,
        lease_lost_at=row["lease_lost_at"] if leased else None,
        lease_revoke_reason=row["lease_revoke_reason"] if leased else None,
        delay_until=row["delay_until"],
        deadline_at=row["deadline_at"],
        attempt_timeout_at=row["attempt_timeout_at"],
        attempt_timeout_remaining=row["attempt_timeout_left"],
        has_result=row["has_result"],
        result_encoding=row["result_encoding"],
        failure_reason=row["failure_reason"],
        failure_category=row["failure_category"],
        cancellation_reason=row["cancellation_reason"],
        cancelled_by=row["cancelled_by"],
        progress_pct=row["progress_pct"],
        progress_message=row["progress_message"],
        progress_updated_at=row["progress_updated_at"],
        last_capability_mismatch_at=row["capability_mismatch_at"],
        last_hmac_validation_failed_at=row["hmac_failed_at"],
        suspension_timeout_at=row["suspension_timeout_at"],
        current_waitpoint=row["current_waitpoint_id"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        completed_at=row["completed_at"],
        last_transition_at=row["transitioned_at"],
        last_mutation_at=row["mutated_at"],
    )


def snapshot(row: Row) -> ExecutionSnapshot:
    full = execution(row)
    return ExecutionSnapshot(
        execution_id=full.execution_id,
        flow_id=full.flow_id,
        lane_id=full.lane_id,
        namespace=full.namespace,
        public_state=full.public_state,
        blocking_reason=full.blocking_reason,
        blocking_detail=full.blocking_detail,
        current_attempt=full.current_attempt,
        current_lease=full.current_lease,
        current_waitpoint=full.current_waitpoint,
        created_at=full.created_at,
        last_mutation_at=full.last_mutation_at,
        total_attempt_count=full.total_attempt_count,
        tags=full.tags,
    )


def info(row: Row) -> ExecutionInfo:
    return ExecutionInfo(
        execution_id=ExecutionId.of(row["partition"], row["id"]),
        namespace=row["namespace"],
        lane_id=row["lane"],
        priority=row["priority"],
        execution_kind=row["kind"],
        state_vector=project(
            row["state"],
            row["blocking_reason"],
            row["pending"],
            row["resume_pending"],
            row["lease_lost"],
            row["attempts"],
        ),
        public_state=State(row["state"]),
        created_at=row["created_at"],
        started_at=row["started_at"],
        completed_at=row["completed_at"],
        current_attempt_index=row["attempt_index"] or 0,
        flow_id=row["flow_id"],
        blocking_detail=row["blocking_detail"] or "",
    )


def attempt(row: Row) -> Attempt:
    return Attempt(
        attempt_index=row["attempt_index"],
        attempt_id=row["attempt_id"],
        attempt_type=AttemptType(row["attempt_type"]),
        attempt_lifecycle=row["attempt_lifecycle"],
        started_at=row["started_at"],
        resumed_at=row["resumed_at"],
        suspended_at=row["suspended_at"],
        ended_at=row["ended_at"],
        lease_id=row["lease_id"],
        lease_epoch=row["lease_epoch"],
        worker_id=row["worker_id"],
        worker_instance_id=row["worker_instance_id"],
        failure_reason=row["failure_reason"],
        failure_category=row["failure_category"],
        policy_snapshot=decode_json(row["policy_snapshot"]),
        retry_reason=row["retry_reason"],
        previous_attempt_index=row["previous_attempt_index"],
        replay_reason=row["replay_reason"],
        replay_requested_by=row["replay_requested_by"],
        replayed_from_attempt_index=row["replayed_from_attempt_index"],
        reclaim_reason=row["reclaim_reason"],
        end_disposition=row["disposition"],
        retry_at=row["retry_at"],
    )


def event(row: Row) -> Event:
    return Event(
        cursor=EventCursor(row["seq"]),
        occurred_at=row["occurred_at"],
        execution_id=None if row["id"] is None else ExecutionId.of(row["partition"], row["id"]),
        flow_id=row["flow_id"],
        namespace=row["namespace"],
        tags=decode_json(row["tags"]) or {},
        lease_type=row["lease_type"],
        outcome="failed" if row["outcome"] == "failure" else row["outcome"],
        operator_type=row["operator_type"],
        signal_effect=row["signal_effect"],
        lease_id=row["lease_id"],
        lease_epoch=row["lease_epoch"],
        attempt_id=row["attempt_id"],
        attempt_index=row["attempt_index"],
        worker_id=row["worker_id"],
        worker_instance_id=row["worker_instance_id"],
        reason=row["reason"],
        revoked_by=row["revoked_by"],
        details=decode_json(row["details"]),
    )


def step(row: Row) -> Step:
    """A remembered step."""
    return Step(
        execution_id=ExecutionId.of(row["partition"], row["id"]),
        generation=row["generation"],
        name=row["name"],
        n=row["n"],
        kind=row["kind"],
        run=row["run"],
        attempt_index=row["attempt_index"],
        result=row["result"],
        encoding=row["encoding"],
        error=decode_json(row["error"]),
        at=row["at"],
        child_id=None if row["child_id"] is None else ExecutionId.of(row["child_partition"], row["child_id"]),
        seconds=row["seconds"],
        recorded_at=row["recorded_at"],
        waitpoint_ids=tuple(row["waitpoint_ids"] or ()),
    )


def schedule(row: Row) -> Schedule:
    """Recurring work as it is stored."""
    return Schedule(
        name=row["name"],
        kind=row["kind"],
        timing=decode_json(row["timing"]),
        catch_up=row["catch_up"],
        options=decode_json(row["options"]),
        paused=row["paused"],
        next_at=row["next_at"],
        last_at=row["last_at"],
        last_execution_id=None if row["last_id"] is None else ExecutionId.of(row["last_partition"], row["last_id"]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        payload=row["payload"],
        payload_encoding=row["payload_encoding"],
    )
