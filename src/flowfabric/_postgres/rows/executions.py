"""Executions, their attempts, and how they ended."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._postgres.rows.values import Row, json_of, one_of, readable
from flowfabric.values.attempt import Attempt, AttemptType, Cancelled, CurrentAttempt
from flowfabric.values.child import Child
from flowfabric.values.execution import Execution, ExecutionContext, ExecutionInfo, ExecutionSnapshot, Outcome
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import CurrentLease, ExpiredLease
from flowfabric.values.state import State
from flowfabric.values.vector import project


@readable
def execution(row: Row) -> Execution:
    state = one_of(State, row, "state")
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
    # Once a retry is scheduled, the failed attempt is no longer current; its index stays.
    has_attempt = row["attempt_id"] is not None and row["pending"] != "retry"
    return Execution(
        execution_id=ExecutionId(row["id"]),
        namespace=row["namespace"],
        lane_id=row["lane"],
        execution_kind=row["kind"],
        creator_identity=row["creator"],
        flow_id=row["flow_id"],
        node=row["node"],
        parent_id=row["parent_id"],
        forked_from=row["forked_from"],
        forked_before=row["forked_before"],
        idempotency_key=row["idempotency_key"],
        payload_encoding=row["payload_encoding"],
        tags=json_of(row, "tags") or {},
        policy=json_of(row, "policy"),
        required_capabilities=tuple(row["capabilities"]),
        budget_ids=tuple(row["budget_ids"]),
        quota_policy_ids=tuple(row["quota_policy_ids"]),
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
        version=row["version"],
        stops=row["stops"],
    )


@readable
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


@readable
def info(row: Row) -> ExecutionInfo:
    return ExecutionInfo(
        execution_id=ExecutionId(row["id"]),
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
        public_state=one_of(State, row, "state"),
        created_at=row["created_at"],
        started_at=row["started_at"],
        completed_at=row["completed_at"],
        current_attempt_index=row["attempt_index"] or 0,
        flow_id=row["flow_id"],
        blocking_detail=row["blocking_detail"] or "",
        node=row["node"] or "",
        parent_id=row["parent_id"],
        arguments=_beginning(row["arguments"]),
        version=row["version"],
        stops=row["stops"],
        forked_from=row["forked_from"],
    )


_SHOWN = 120  # characters of arguments in lists
_OF_NODE = '{"given":'  # how the stored arguments of a node begin, if some are results of others


def _beginning(payload: bytes | None) -> str:
    """The beginning of arguments that are stored as plain JSON."""
    text = (payload or b"").decode(errors="ignore").removeprefix(_OF_NODE)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


@readable
def attempt(row: Row) -> Attempt:
    return Attempt(
        attempt_index=row["attempt_index"],
        attempt_id=row["attempt_id"],
        attempt_type=one_of(AttemptType, row, "attempt_type"),
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
        policy_snapshot=json_of(row, "policy_snapshot"),
        retry_reason=row["retry_reason"],
        previous_attempt_index=row["previous_attempt_index"],
        replay_reason=row["replay_reason"],
        replay_requested_by=row["replay_requested_by"],
        replayed_from_attempt_index=row["replayed_from_attempt_index"],
        reclaim_reason=row["reclaim_reason"],
        end_disposition=row["disposition"],
        retry_at=row["retry_at"],
    )


@readable
def child(row: Row) -> Child:
    """A task or flow that a handler submitted."""
    return Child(
        kind="flow" if row["is_flow"] else "execution",
        id=row["id"],
        parent_id=row["parent"],
        name=row["name"],
        node=row["node"],
        state=row["state"],
        created_at=row["created_at"],
        completed_at=row["completed_at"],
        depth=row["depth"],
        arguments=_beginning(row["arguments"]),
    )


@readable
def context(row: Row) -> ExecutionContext:
    """The input of an execution."""
    return ExecutionContext(
        input_payload=row["payload"],
        payload_encoding=row["payload_encoding"],
        execution_kind=row["kind"],
        tags=json_of(row, "tags") or {},
    )


@readable
def outcome(row: Row) -> Outcome:
    """How an execution ended; without a state if it is not stored."""
    return Outcome(
        state=None if row["state"] is None else one_of(State, row, "state"),
        result=row["result"],
        result_encoding=row["result_encoding"],
        failure_reason=row["failure_reason"],
        failure_category=row["failure_category"],
        cancellation_reason=row["cancellation_reason"],
    )


@readable
def expired_lease(row: Row) -> ExpiredLease:
    return ExpiredLease(
        execution_id=ExecutionId(row["id"]),
        lease_id=row["lease_id"],
        lease_epoch=row["epoch"],
        worker_instance_id=row["worker_instance_id"],
        expires_at=row["lease_expires_at"],
        attempt_index=row["attempt_index"],
    )


def cancelled(row: Row, execution_id: ExecutionId) -> Cancelled:
    return Cancelled(execution_id, has_children=row["detail"] == "children", was_cancelled=row["detail"] == "already")
