"""Suspensions: executions that wait for people, callbacks or tools without holding a worker."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Required, TypedDict, Unpack, get_args
from uuid import UUID

import msgspec

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.batch import raised
from flowfabric.engine.checks import (
    check_duration,
    check_limit,
    check_list,
    check_word,
    parse_partition,
    parse_time_cursor,
    time_cursor,
    to_json,
)
from flowfabric.engine.waitpoints import waitpoint_refused
from flowfabric.errors import InvalidInput, StateError
from flowfabric.values.checks import check_text, instant
from flowfabric.values.conditions import Condition, check_condition, condition_to_json, named_keys
from flowfabric.values.ids import ExecutionId, PartitionKey, mint_uuid, parse_execution_id, parse_uuid
from flowfabric.values.lease import Fence, Handle, HandleKind
from flowfabric.values.page import Page
from flowfabric.values.policies import TimeoutBehavior
from flowfabric.values.state import State
from flowfabric.values.wait import (
    AlreadySatisfied,
    ExpiredSuspension,
    Fresh,
    ReasonCode,
    RequestedBy,
    Resumed,
    ResumePolicy,
    Suspended,
    SuspendedExecution,
    Suspension,
    TriggerType,
    UsePending,
)

REASONS = frozenset(get_args(ReasonCode))
_REQUESTERS = frozenset(get_args(RequestedBy))
BEHAVIORS = frozenset(get_args(TimeoutBehavior))
_TRIGGERS = frozenset(get_args(TriggerType))


class HowToSuspend(TypedDict, total=False):
    """The keyword arguments of `suspend`."""

    waitpoints: Required[Sequence[Fresh | UsePending]]
    resume_condition: Required[Condition | dict[str, Any] | str]
    suspension_id: UUID | None
    resume_policy: ResumePolicy | None
    reason_code: ReasonCode
    requested_by: RequestedBy
    timeout_at: datetime | timedelta | None
    timeout_behavior: TimeoutBehavior
    continuation_metadata_pointer: str | None
    idempotency_key: str | None


class Suspensions(Operations):
    """suspend, resume_execution, expire_suspension, read_suspension, list_suspended."""

    async def suspend(
        self,
        authority: Handle,
        *,
        waitpoints: Sequence[Fresh | UsePending],
        resume_condition: Condition | dict[str, Any] | str,
        suspension_id: UUID | None = None,
        resume_policy: ResumePolicy | None = None,
        reason_code: ReasonCode = "waiting_for_signal",
        requested_by: RequestedBy = "worker",
        timeout_at: datetime | timedelta | None = None,
        timeout_behavior: TimeoutBehavior = "fail",
        continuation_metadata_pointer: str | None = None,
        idempotency_key: str | None = None,
    ) -> Suspended | AlreadySatisfied:
        """Give the lease back until signals satisfy the condition, an operator resumes it, or it times out.

        If signals that arrived on a pending waitpoint already satisfy it, the lease is kept and `observe_signals`
        returns them. A repeated call with the same `idempotency_key` and lease returns the first result.
        `timeout_at` is a time, or a duration from now on.
        """
        if not isinstance(authority, Handle):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Handle")
        args = _suspend_args(
            waitpoints=waitpoints,
            resume_condition=resume_condition,
            suspension_id=suspension_id,
            resume_policy=resume_policy,
            reason_code=reason_code,
            requested_by=requested_by,
            timeout_at=timeout_at,
            timeout_behavior=timeout_behavior,
            continuation_metadata_pointer=continuation_metadata_pointer,
            idempotency_key=idempotency_key,
        )
        if authority.kind is HandleKind.SUSPENDED:
            raise StateError("already_suspended", execution_id=authority.execution_id)
        return await self._suspend(authority, False, args)

    async def suspend_by_triple(self, authority: Fence, **how: Unpack[HowToSuspend]) -> Suspended | AlreadySatisfied:
        """The same with a fence instead of a handle; takes the arguments of `suspend`."""
        if not isinstance(authority, Fence):
            raise InvalidInput(f"got {type(authority).__name__}", field="authority", allowed="a Fence")
        return await self._suspend(authority, True, _suspend_args(**how))

    async def suspend_on(
        self,
        authority: Handle,
        waitpoints: Sequence[UUID],
        resume_condition: Condition,
        *,
        reason_code: ReasonCode = "waiting_for_signal",
        timeout_at: datetime | timedelta | None = None,
        timeout_behavior: TimeoutBehavior = "fail",
    ) -> Suspended | AlreadySatisfied:
        """`suspend` on any number of pending waitpoints, as tasks do: their tokens were handed out before."""
        bindings = [parse_uuid(one, "waitpoints") for one in check_list(waitpoints, "waitpoints")]
        if not bindings:
            raise InvalidInput("waitpoints_empty", field="waitpoints", allowed="at least one")
        condition = check_condition(resume_condition, has_deadline=timeout_at is not None)
        args = (
            mint_uuid(),
            bindings,
            [None] * len(bindings),
            to_json(condition_to_json(condition)),
            to_json(_policy(None)),
            check_word(reason_code, REASONS, "reason_code"),
            "worker",
            *instant(timeout_at, "timeout_at"),
            check_word(timeout_behavior, BEHAVIORS, "timeout_behavior"),
            None,
            None,
        )
        return await self._suspend(authority, False, args)

    async def _suspend(
        self, authority: Handle | Fence, by_triple: bool, args: tuple[Any, ...]
    ) -> Suspended | AlreadySatisfied:
        fences = self._fences([authority])
        execution_id = fences.execution_id(0)
        _, _, lease_id, lease_epoch, attempt_id, _ = fences.first
        row = await self._row(statements.SUSPEND, *fences.first, by_triple, *args)
        if row["code"] != "ok":
            raise waitpoint_refused(row, execution_id, args[1])
        details = rows.suspension_details(row)
        if row["variant"] == "already_satisfied":
            return AlreadySatisfied("signals", details)
        if isinstance(authority, Handle):
            return Suspended(details, msgspec.structs.replace(authority, kind=HandleKind.SUSPENDED))
        return Suspended(
            details,
            Handle(
                partition=self._home(execution_id),
                uuid=execution_id,
                attempt_index=row["attempt_index"],
                attempt_id=attempt_id,
                lease_id=lease_id,
                lease_epoch=lease_epoch,
                lease_ttl=timedelta(milliseconds=row["lease_ttl_ms"]),
                lane_id=row["lane"],
                worker_instance_id=row["worker_instance_id"],
                kind=HandleKind.SUSPENDED,
            ),
        )

    async def resume_execution(
        self,
        execution_id: ExecutionId,
        trigger_type: TriggerType = "signal",
        resume_delay: timedelta = timedelta(0),
    ) -> Resumed:
        """Resume a suspended execution whatever its condition says; an operator's override."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.RESUME_EXECUTION,
            *self._at(target),
            check_word(trigger_type, _TRIGGERS, "trigger_type"),
            check_duration(resume_delay, "resume_delay", least_ms=0),
        )
        if row["code"] != "ok":
            raise raised(row, target)
        return Resumed(target, State(row["state"]))

    async def expire_suspension(self, execution_id: ExecutionId) -> ExpiredSuspension | AlreadySatisfied:
        """End one suspension if it has timed out; the duty does this for all."""
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.EXPIRE_SUSPENSION,
            *self._at(target),
            repeatable=True,
        )
        if row["code"] == "done":
            return ExpiredSuspension(target, row["behavior"])
        return AlreadySatisfied(row["code"])

    async def read_suspension(self, execution_id: ExecutionId) -> Suspension | None:
        """The newest suspension of an execution, open or closed; None when it has none."""
        target = parse_execution_id(execution_id)
        found = await self._fetch(statements.READ_SUSPENSION, *self._at(target), repeatable=True)
        if not found:
            return None
        return rows.suspension(found[0], target)

    async def list_suspended(
        self, partition_key: int | str | PartitionKey, *, cursor: str | None = None, limit: int = 100
    ) -> Page[SuspendedExecution, str]:
        """Return the suspended executions of a partition, by when they were suspended."""
        partition = parse_partition(partition_key, self._database.flow_partitions)
        at, uuid = parse_time_cursor(cursor)
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_SUSPENDED, partition, at, uuid, size, repeatable=True)
        suspended = [rows.suspended_execution(row) for row in found]
        return first_page(suspended, size, lambda last: time_cursor(last.suspended_at, last.execution_id))


def _suspend_args(
    *,
    waitpoints: Sequence[Fresh | UsePending],
    resume_condition: Condition | dict[str, Any] | str,
    suspension_id: UUID | None = None,
    resume_policy: ResumePolicy | None = None,
    reason_code: ReasonCode = "waiting_for_signal",
    requested_by: RequestedBy = "worker",
    timeout_at: datetime | timedelta | None = None,
    timeout_behavior: TimeoutBehavior = "fail",
    continuation_metadata_pointer: str | None = None,
    idempotency_key: str | None = None,
) -> tuple[Any, ...]:
    """Check the arguments of a suspend in the order of the contract; the detail of an error begins with its code."""
    bindings = waitpoints
    if isinstance(bindings, str | bytes) or not isinstance(bindings, Sequence):
        raise InvalidInput(f"got {type(bindings).__name__}", field="waitpoints", allowed="a list of bindings")
    if not bindings:
        raise InvalidInput("waitpoints_empty", allowed="at least one binding")
    for binding in bindings:
        if not isinstance(binding, Fresh | UsePending):
            raise InvalidInput(f"got {type(binding).__name__}", field="waitpoints", allowed="Fresh or UsePending")
    ends_at, ends_in = instant(timeout_at, "timeout_at")
    condition = check_condition(resume_condition, has_deadline=timeout_at is not None)
    fresh = [binding for binding in bindings if isinstance(binding, Fresh)]
    for binding in fresh:
        if check_text(binding.waitpoint_key, "waitpoint_key") == "":
            raise InvalidInput("waitpoint_key_empty", allowed="a non-empty key")
    ids = [parse_uuid(binding.waitpoint_id, "waitpoint_id") for binding in bindings]
    keys = [binding.waitpoint_key for binding in fresh]
    if len(set(ids)) < len(ids) or len(set(keys)) < len(keys):
        raise InvalidInput("duplicate_waitpoint_binding", allowed="distinct ids and keys")
    if len(fresh) < len(bindings) and len(bindings) > 1:
        raise InvalidInput("use_pending_with_extras_unsupported", allowed="UsePending alone")
    if fresh:
        _check_binding(condition, keys)
    return (
        mint_uuid() if suspension_id is None else parse_uuid(suspension_id, "suspension_id"),
        ids,
        [binding.waitpoint_key if isinstance(binding, Fresh) else None for binding in bindings],
        to_json(condition_to_json(condition)),
        to_json(_policy(resume_policy)),
        check_word(reason_code, REASONS, "reason_code"),
        check_word(requested_by, _REQUESTERS, "requested_by"),
        ends_at,
        ends_in,
        check_word(timeout_behavior, BEHAVIORS, "timeout_behavior"),
        None
        if continuation_metadata_pointer is None
        else check_text(continuation_metadata_pointer, "continuation_metadata_pointer", 65_536),
        None if idempotency_key is None else check_text(idempotency_key, "idempotency_key", 512),
    )


def _check_binding(condition: Condition, keys: list[str]) -> None:
    """Require a binding for every key of the condition, and no others: except one under Operator- or TimeoutOnly."""
    named = named_keys(condition)
    if len(keys) == 1 and type(condition).__name__ == "Single" and named != keys:
        raise InvalidInput("waitpoint_key_mismatch", allowed=f"the condition's key {named[0]!r}")
    for key in named:
        if key not in keys:
            raise InvalidInput(f"referenced_waitpoint_key_missing_binding: {key}")
    if len(keys) == 1 and type(condition).__name__ in ("OperatorOnly", "TimeoutOnly"):
        return
    for key in keys:
        if key not in named:
            raise InvalidInput(f"extra_binding_not_referenced_by_condition: {key}")


def _policy(value: object) -> dict[str, Any]:
    policy = ResumePolicy() if value is None else value
    if not isinstance(policy, ResumePolicy) or policy.resume_target != "runnable":
        raise InvalidInput(f"got {value!r}", field="resume_policy", allowed="a ResumePolicy with target runnable")
    delay = policy.resume_delay
    return {
        "resume_target": policy.resume_target,
        "resume_delay_ms": None if delay is None else check_duration(delay, "resume_delay", least_ms=0),
        "consume_matched_signals": bool(policy.consume_matched_signals),
        "retain_signal_buffer_until_closed": bool(policy.retain_signal_buffer_until_closed),
        "close_waitpoint_on_resume": bool(policy.close_waitpoint_on_resume),
    }
