"""Leases, and the authorities with which a caller may change an execution.

A `Handle` is the lease that a claim returned, a bare `Fence` its three numbers, an `Operator` an override without a
lease.
"""

from __future__ import annotations

import struct
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import Corruption
from flowfabric.values.ids import MAX_PARTITION, AttemptId, ExecutionId, LeaseId
from flowfabric.values.state import State


class HandleKind(StrEnum):
    """How the lease was obtained."""

    FRESH = "fresh"
    RESUMED = "resumed"
    SUSPENDED = "suspended"
    RECLAIMED = "reclaimed"


_FORMAT = 2
_LAYOUT = 2
_KINDS: dict[str, int] = {kind.value: number for number, kind in enumerate(HandleKind)}


class Handle(Struct, frozen=True, kw_only=True, gc=False):
    """The lease a worker holds on one execution. A value: keep it, copy it, send it; the engine never changes it."""

    partition: int
    uuid: UUID
    attempt_index: int
    attempt_id: UUID
    lease_id: UUID
    lease_epoch: int
    lease_ttl: timedelta
    lane_id: str
    worker_instance_id: str
    kind: HandleKind = HandleKind.FRESH

    @property
    def execution_id(self) -> ExecutionId:
        return ExecutionId(self.uuid)

    @property
    def fence(self) -> Fence:
        return Fence(
            execution_id=self.execution_id,
            lease_id=LeaseId(self.lease_id),
            lease_epoch=self.lease_epoch,
            attempt_id=AttemptId(self.attempt_id),
            attempt_index=self.attempt_index,
        )

    def encode(self) -> bytes:
        """The handle as bytes, for another process of the same deployment."""
        parts = [struct.pack("<BBB", _FORMAT, _LAYOUT, _KINDS[self.kind])]
        for value in (
            self.partition,
            str(self.uuid),
            self.attempt_index,
            str(self.attempt_id),
            str(self.lease_id),
            self.lease_epoch,
            self.lease_ttl // timedelta(milliseconds=1),
            self.lane_id,
            self.worker_instance_id,
        ):
            if isinstance(value, int):
                parts.append(struct.pack("<Q", value))
            else:
                text = value.encode()
                parts.append(struct.pack("<I", len(text)) + text)
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Handle:
        """Read a handle from the bytes of `encode`; other bytes raise `Corruption` (`handle_codec:...`)."""
        try:
            reader = _Reader(bytes(data))
            if reader.byte() != _FORMAT or reader.byte() != _LAYOUT:
                raise ValueError("unknown marker or version")
            kind = list(HandleKind)[reader.byte()]
            handle = cls(
                partition=reader.number(MAX_PARTITION),
                uuid=UUID(reader.text()),
                attempt_index=reader.number(2**31 - 1),
                attempt_id=UUID(reader.text()),
                lease_id=UUID(reader.text()),
                lease_epoch=reader.number(2**63 - 1),
                lease_ttl=timedelta(milliseconds=reader.number(10**13)),
                lane_id=reader.text(),
                worker_instance_id=reader.text(),
                kind=kind,
            )
            reader.end()
        except Corruption:
            raise
        except Exception as error:
            raise Corruption(f"handle_codec: {type(error).__name__}: {error}") from None
        return handle


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        if len(self._data) - self._at < size:
            raise ValueError("truncated")
        self._at += size
        return self._data[self._at - size : self._at]

    def byte(self) -> int:
        return self._take(1)[0]

    def number(self, most: int) -> int:
        number = int(struct.unpack("<Q", self._take(8))[0])
        if number > most:
            raise ValueError(f"{number} is too large")
        return number

    def text(self) -> str:
        return self._take(int(struct.unpack("<I", self._take(4))[0])).decode()

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("trailing bytes")


class Fence(Struct, frozen=True, kw_only=True):
    """The three values that identify one lease; all are compared, and the attempt index too if given."""

    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int
    attempt_id: AttemptId
    attempt_index: int | None = None


class Operator(Struct, frozen=True):
    """An operator's override without a lease. `source` says for whom, when cancelling."""

    execution_id: ExecutionId
    source: str = "operator_override"


Authority: TypeAlias = Handle | Fence | Operator


class Renewed(Struct, frozen=True, gc=False):
    expires_at: datetime
    lease_epoch: int


class Released(Struct, frozen=True):
    execution_id: ExecutionId
    public_state: State = State.WAITING


class Stopped(Struct, frozen=True):
    """The execution waits for other code; from `opens_at` on every worker of its kind may claim it."""

    execution_id: ExecutionId
    public_state: State
    opens_at: datetime


class Revoked(Struct, frozen=True):
    """The lease just revoked."""

    execution_id: ExecutionId
    lease_id: LeaseId
    lease_epoch: int


class CurrentLease(Struct, frozen=True, kw_only=True):
    """The lease of an active execution. `lease_id` is the right to report: only the role operate reads it."""

    lease_id: LeaseId | None
    lease_epoch: int
    worker_id: str
    worker_instance_id: str
    acquired_at: datetime
    expires_at: datetime
    renewal_deadline: datetime
    attempt_index: int
    last_heartbeat_at: datetime


class ExpiredLease(Struct, frozen=True, kw_only=True):
    """A lease that expired. `lease_id` is None unless the database user has the role operate."""

    execution_id: ExecutionId
    lease_id: LeaseId | None
    lease_epoch: int
    worker_instance_id: str
    expires_at: datetime
    attempt_index: int
