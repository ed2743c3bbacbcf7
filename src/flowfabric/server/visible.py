"""The part of a record that a caller may see: leases only operators, payloads only keys that do not hide them.

The id of a lease is the right to report in its name, so it is shown only where the caller could take the lease away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from flowfabric.contracts import json_form
from flowfabric.contracts.codecs import Codecs, shown
from flowfabric.server.call import Call, Caller
from flowfabric.server.operation import Scope
from flowfabric.server.problems import Problem
from flowfabric.values.attempt import Attempt
from flowfabric.values.event import Event, Family
from flowfabric.values.execution import Execution, ExecutionInfo
from flowfabric.values.ids import AttemptId, ExecutionId, FlowId, LeaseId
from flowfabric.values.lease import CurrentLease
from flowfabric.values.signal import RecordedSignal
from flowfabric.values.step import Step, StepKind

_Found = TypeVar("_Found")
_Form = TypeVar("_Form")


class RecordedStep(Struct, frozen=True, kw_only=True):
    """A step of an execution. `result` is a JSON value, or base64; None too if the key hides payloads."""

    generation: int
    name: str
    n: int
    kind: StepKind
    run: int
    attempt_index: int
    result: Any
    encoding: str | None
    error: dict[str, Any] | None
    at: datetime | None
    child_id: ExecutionId | None
    seconds: float | None
    recorded_at: datetime
    waitpoint_ids: tuple[UUID, ...]
    outcome: str | None
    flow_id: FlowId | None
    is_stray: bool
    is_unread: bool


class DeliveredSignal(Struct, frozen=True, kw_only=True):
    """A signal and its effect. `payload` is a JSON value, or base64; None too if the key hides payloads."""

    signal_id: UUID
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: datetime
    payload: Any
    payload_encoding: str
    waitpoint_key: str
    ordinal: int
    waitpoint_id: UUID
    suspension_id: UUID | None
    target_scope: str
    created_at: datetime
    observed_effect: str
    match_detail: str
    refused: str | None


class RecordedEvent(Struct, frozen=True, kw_only=True):
    """One transition. `cursor` is its position in the log; `families` are those it belongs to.

    What happened is in the member of its family, and `reason` may say why: `lease_type` (`acquired`, `renewed`,
    `expired`, `reclaimed`, `revoked`), `outcome` (`success`, `failed`, `cancelled`, `expired`, `skipped`),
    `operator_type`, `signal_effect` or `worker_type`. A task that begins to wait is `revoked` with the reason
    `suspend`. Members that do not apply are null.
    """

    cursor: str
    families: tuple[Family, ...]
    occurred_at: datetime
    execution_id: ExecutionId | None
    flow_id: FlowId | None
    namespace: str | None
    tags: dict[str, str]
    lease_type: str | None
    outcome: str | None
    operator_type: str | None
    signal_effect: str | None
    worker_type: str | None
    lease_id: LeaseId | None
    lease_epoch: int | None
    attempt_id: AttemptId | None
    attempt_index: int | None
    worker_id: str | None
    worker_instance_id: str | None
    reason: str | None
    revoked_by: str | None
    details: dict[str, Any] | None
    parent_id: ExecutionId | None
    lane_id: str | None
    execution_kind: str | None
    actor: str | None


def sees_leases(caller: Caller) -> bool:
    """Whether a caller may take leases away, and so may see their ids."""
    return not caller.scopes.isdisjoint((Scope.OPERATE, Scope.ADMIN))


def check_payloads(call: Call) -> None:
    """Refuse a request for payloads alone to a key that hides them."""
    if call.caller.hides_payloads:
        raise Problem(403, "forbidden", "the API key hides payloads")


def size_of(*stored: bytes | str | None) -> int:
    """How long payloads and texts are, as they are stored."""
    return sum(len(one) for one in stored if one is not None)


async def open_each(
    call: Call, found: Sequence[_Found], form: Callable[[_Found], _Form], size: Callable[[_Found], int]
) -> list[_Form]:
    """The form in which the caller sees each; `size` is how many bytes have to be opened for it."""
    return await call.service.opening.run(sum(map(size, found)), lambda: [form(one) for one in found])


async def open_execution(call: Call, found: Execution) -> Execution:
    """An execution as the caller may see it."""
    return await call.service.opening.run(size_of(found.failure_reason), lambda: execution_for(call, found))


def execution_for(call: Call, found: Execution) -> Execution:
    """An execution as the caller may see it."""
    codecs, hides = call.service.codecs, call.caller.hides_payloads
    changes: dict[str, Any] = {}
    if not sees_leases(call.caller):
        if found.current_lease is not None:
            changes["current_lease"] = _without_id(found.current_lease)
        if found.lost_lease is not None:
            changes["lost_lease"] = _without_id(found.lost_lease)
    if found.failure_reason:
        changes["failure_reason"] = None if hides else opened(found.failure_reason, codecs, found.execution_id)
    if hides and found.progress_message:
        changes["progress_message"] = None
    return replace(found, **changes) if changes else found


def infos_for(call: Call, found: Sequence[ExecutionInfo]) -> Sequence[ExecutionInfo]:
    """Executions of a list as the caller may see them."""
    return [replace(one, arguments="") for one in found] if call.caller.hides_payloads else found


def attempt_for(call: Call, found: Attempt, execution_id: UUID) -> Attempt:
    """An attempt as the caller may see it."""
    changes: dict[str, Any] = {}
    if found.lease_id is not None and not sees_leases(call.caller):
        changes["lease_id"] = None
    if found.failure_reason:
        hides = call.caller.hides_payloads
        changes["failure_reason"] = None if hides else opened(found.failure_reason, call.service.codecs, execution_id)
    return replace(found, **changes) if changes else found


def step_for(call: Call, found: Step) -> RecordedStep:
    """A step as the caller may see it."""
    hides = call.caller.hides_payloads
    members = {name: getattr(found, name) for name in RecordedStep.__struct_fields__ if name not in ("result", "error")}
    return RecordedStep(
        **members,
        result=None if hides else json_form.step_result(found, call.service.codecs, raw=True),
        error=None if hides else found.error,
    )


def signal_for(call: Call, found: RecordedSignal, execution_id: UUID) -> DeliveredSignal:
    """A signal as the caller may see it."""
    members = {name: getattr(found, name) for name in DeliveredSignal.__struct_fields__ if name != "payload"}
    payload = None
    if not call.caller.hides_payloads:
        payload = json_form.payload_or_problem(
            found.payload, found.payload_encoding, call.service.codecs, execution_id, raw=True
        )
    return DeliveredSignal(**members, payload=payload)


def event_for(caller: Caller, found: Event) -> RecordedEvent:
    """An event as the caller may see it."""
    members = {name: getattr(found, name) for name in Event.__struct_fields__ if name not in ("cursor", "lease_id")}
    return RecordedEvent(
        **members,
        cursor=str(found.cursor),
        families=found.families,
        lease_id=found.lease_id if sees_leases(caller) else None,
    )


def opened(text: str | None, codecs: Codecs | None, execution_id: UUID) -> str | None:
    """A text as its handler reported it; without the codecs of the app only that there is one."""
    if not text:
        return text
    return shown(text) if codecs is None else codecs.open_text(text, execution_id)


def _without_id(lease: CurrentLease) -> CurrentLease:
    return replace(lease, lease_id=None)
