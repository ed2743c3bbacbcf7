"""The event log as it is read and followed."""

from __future__ import annotations

import re
import struct
from datetime import datetime
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field

from flowfabric.errors import InvalidInput
from flowfabric.values.ids import AttemptId, ExecutionId, FlowId, LeaseId
from flowfabric.values.page import ScannerFilter

Family: TypeAlias = Literal["lease", "completion", "operator", "signal", "worker"]
FAMILIES: tuple[Family, ...] = ("lease", "completion", "operator", "signal", "worker")
FAMILY_BITS: dict[str, int] = {family: 1 << at for at, family in enumerate(FAMILIES)}
HEARTBEATS = 32  # of workers: an own bit, because followers get them only when they ask
_MARKER = 2
_TEXT = re.compile(r"(\d{1,19})\.(\d{1,10})", re.ASCII)
_WITH_EPOCH = struct.Struct(">BqI")
_WITHOUT_EPOCH = struct.Struct(">Bq")


class EventCursor(Struct, frozen=True, gc=False):
    """A position in the event log; the default is its beginning. Store it as `encode()`, or as `str(cursor)`.

    `epoch` says which log: after a restore or failover the deployment writes another, which shares the beginning of the
    one before. The first is 0.
    """

    position: int = 0
    epoch: int = 0

    def encode(self) -> bytes:
        """Return the cursor as 13 bytes."""
        return _WITH_EPOCH.pack(_MARKER, self.position, self.epoch)

    @classmethod
    def decode(cls, data: bytes) -> EventCursor:
        """Read a cursor from the bytes of `encode`, or from 9 bytes without an epoch, as of the first one."""
        epoch = 0
        try:
            if len(data) == _WITHOUT_EPOCH.size:
                marker, position = _WITHOUT_EPOCH.unpack(data)
            else:
                marker, position, epoch = _WITH_EPOCH.unpack(data)
        except (struct.error, TypeError):
            marker, position = None, -1
        if marker != _MARKER or position < 0:
            raise InvalidInput("not a cursor of the event log", field="cursor", allowed="the bytes of encode()")
        return cls(position, epoch)

    def __str__(self) -> str:
        return f"{self.position}.{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> EventCursor:
        """Read a cursor from its text, `<position>.<epoch>`; `0` is the beginning."""
        found = _TEXT.fullmatch("0.0" if text == "0" else text) if isinstance(text, str) else None
        position, epoch = map(int, found.groups()) if found is not None else (-1, 0)
        if not (0 <= position < 2**63 and epoch < 2**32):
            raise InvalidInput(
                f"not a cursor of the event log: {text!r}",
                field="cursor",
                allowed="<position>.<epoch> such as 4711.0, or 0",
            )
        return cls(position, epoch)


class EventFilter(ScannerFilter, frozen=True, kw_only=True):
    """Restricts events: every field that is set must match exactly. An event without the compared field never matches.

    `kind` is the kind of the event's execution, `execution_id` and `flow_id` are those of the event.
    """

    flow_id: FlowId | None = None
    execution_id: ExecutionId | None = None
    kind: str | None = None


class Event(Struct, frozen=True, kw_only=True):
    """One transition. A row that ends a leased execution belongs to both the lease and the completion family.

    `parent_id` is set when a child ends: the execution whose handler submitted it. `lane_id` and `execution_kind` are
    those of the execution. `actor` is the name of the API key with which an operator did this over HTTP.
    """

    cursor: EventCursor
    occurred_at: datetime
    execution_id: ExecutionId | None
    flow_id: FlowId | None
    namespace: str | None
    tags: dict[str, str] = field(default_factory=dict)
    lease_type: str | None = None
    outcome: str | None = None
    operator_type: str | None = None
    signal_effect: str | None = None
    worker_type: str | None = None
    lease_id: LeaseId | None = None
    lease_epoch: int | None = None
    attempt_id: AttemptId | None = None
    attempt_index: int | None = None
    worker_id: str | None = None
    worker_instance_id: str | None = None
    reason: str | None = None
    revoked_by: str | None = None
    details: dict[str, Any] | None = None
    parent_id: ExecutionId | None = None
    lane_id: str | None = None
    execution_kind: str | None = None
    actor: str | None = None

    @property
    def families(self) -> tuple[Family, ...]:
        """The families it belongs to: one, or two for the end of a leased execution."""
        words = (self.lease_type, self.outcome, self.operator_type, self.signal_effect, self.worker_type)
        return tuple(family for family, word in zip(FAMILIES, words, strict=True) if word is not None)


class _Envelope(Struct, frozen=True, kw_only=True):
    cursor: EventCursor
    occurred_at: datetime
    execution_id: ExecutionId | None = None
    flow_id: FlowId | None = None
    namespace: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    lane_id: str | None = None
    execution_kind: str | None = None


class CompletionEvent(_Envelope, frozen=True, kw_only=True):
    """An execution ended: `outcome` is success, failed, cancelled, expired or skipped."""

    outcome: str
    attempt_index: int | None = None
    parent_id: ExecutionId | None = None


class LeaseEvent(_Envelope, frozen=True, kw_only=True):
    """A lease was acquired, renewed, expired, reclaimed or revoked; of the new owner for the first and the fourth.

    `revoked_by` is operator, backend (given up, or ended by its holder) or reconciler. `lease_id` is for operators.
    """

    event_type: str
    lease_id: LeaseId | None = None
    lease_epoch: int | None = None
    attempt_id: AttemptId | None = None
    attempt_index: int | None = None
    worker_id: str | None = None
    worker_instance_id: str | None = None
    reason: str | None = None
    revoked_by: str | None = None


class SignalEvent(_Envelope, frozen=True, kw_only=True):
    """A signal was accepted, or was repeated (`deduped`); never with its payload."""

    effect: str
    signal_id: str | None = None
    waitpoint_id: str | None = None
    source_identity: str | None = None


class OperatorEvent(_Envelope, frozen=True, kw_only=True):
    """An operator, or a limit, changed something: `details` says what, `actor` with whose API key it was done."""

    event_type: str
    reason: str | None = None
    actor: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


class RegistryEvent(_Envelope, frozen=True, kw_only=True):
    """A worker registered, was marked dead, or was swept (ttl_swept); heartbeats only on request."""

    event_type: str
    worker_id: str | None = None
    worker_instance_id: str | None = None
    reason: str | None = None


class Checkpoint(Struct, frozen=True):
    """Not an event: everything up to `cursor` was read, and what matched was delivered."""

    cursor: EventCursor


def _envelope(event: Event) -> dict[str, Any]:
    return {
        "cursor": event.cursor,
        "occurred_at": event.occurred_at,
        "execution_id": event.execution_id,
        "flow_id": event.flow_id,
        "namespace": event.namespace,
        "tags": event.tags,
        "lane_id": event.lane_id,
        "execution_kind": event.execution_kind,
    }


def completion_event(event: Event) -> CompletionEvent:
    """Return the completion part of a row."""
    return CompletionEvent(
        **_envelope(event), outcome=event.outcome or "", attempt_index=event.attempt_index, parent_id=event.parent_id
    )


def lease_event(event: Event) -> LeaseEvent:
    """Return the lease part of a row."""
    return LeaseEvent(
        **_envelope(event),
        event_type=event.lease_type or "",
        lease_id=event.lease_id,
        lease_epoch=event.lease_epoch,
        attempt_id=event.attempt_id,
        attempt_index=event.attempt_index,
        worker_id=event.worker_id,
        worker_instance_id=event.worker_instance_id,
        reason=event.reason,
        revoked_by=event.revoked_by,
    )


def signal_event(event: Event) -> SignalEvent:
    """Return the signal part of a row."""
    details = event.details or {}
    return SignalEvent(
        **_envelope(event),
        effect=event.signal_effect or "",
        signal_id=details.get("signal_id"),
        waitpoint_id=details.get("waitpoint_id"),
        source_identity=details.get("source_identity"),
    )


def operator_event(event: Event) -> OperatorEvent:
    """Return the operator part of a row."""
    return OperatorEvent(
        **_envelope(event),
        event_type=event.operator_type or "",
        reason=event.reason,
        actor=event.actor,
        details=event.details or {},
    )


def registry_event(event: Event) -> RegistryEvent:
    """Return the worker part of a row."""
    return RegistryEvent(
        **_envelope(event),
        event_type=event.worker_type or "",
        worker_id=event.worker_id,
        worker_instance_id=event.worker_instance_id,
        reason=event.reason,
    )


class EventCounts(Struct, frozen=True, kw_only=True):
    """How many events of each family and type there were up to `cursor`, where the next count continues."""

    cursor: EventCursor
    lease: dict[str, int]
    completion: dict[str, int]
    operator: dict[str, int]
    signal: dict[str, int]
    worker: dict[str, int] = field(default_factory=dict)
