"""The event log as it is read."""

from __future__ import annotations

import struct
from datetime import datetime
from typing import Any

from msgspec import Struct, field

from flowfabric.errors import InvalidInput
from flowfabric.values.ids import AttemptId, ExecutionId, FlowId, LeaseId

_MARKER = 2
_WITH_EPOCH = struct.Struct(">BqI")
_WITHOUT_EPOCH = struct.Struct(">Bq")


class EventCursor(Struct, frozen=True):
    """A position in the event log; the default is its beginning. Store it as the bytes of `encode`.

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


class Event(Struct, frozen=True, kw_only=True):
    """One transition. A row that ends a leased execution belongs to both the lease and the completion family.

    `parent_id` is set when a child ends: the execution whose handler submitted it.
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


class EventCounts(Struct, frozen=True, kw_only=True):
    """How many events of each family and type there were up to `cursor`, where the next count continues."""

    cursor: EventCursor
    lease: dict[str, int]
    completion: dict[str, int]
    operator: dict[str, int]
    signal: dict[str, int]
