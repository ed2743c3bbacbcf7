"""Grants, for schedulers that decide themselves which worker may claim."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from flowfabric.values.ids import ExecutionId


class ClaimGrant(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    grant_key: str
    expires_at: datetime

    def __repr__(self) -> str:
        return f"{type(self).__name__}(execution_id={self.execution_id!r}, expires_at={self.expires_at!r})"


class ResumeGrant(ClaimGrant, frozen=True, kw_only=True):
    lane_id: str


class ReclaimGrant(ClaimGrant, frozen=True, kw_only=True):
    lane_id: str


class Granted(Struct, frozen=True):
    """An execution is reserved: the worker consumes the grant; a `ResumeGrant` continues an interrupted attempt."""

    grant: ClaimGrant


class ReclaimGranted(Struct, frozen=True):
    """An execution whose lease was lost is reserved: the worker takes it over with the grant."""

    grant: ReclaimGrant


class NoWork(Struct, frozen=True):
    """Nothing that this worker can run is claimable now: ask again after a poll interval."""


class NotReclaimable(Struct, frozen=True):
    execution_id: ExecutionId
    detail: str


class ReclaimCapExceeded(Struct, frozen=True):
    """The lease was lost too often, so the execution failed."""

    execution_id: ExecutionId
    reclaim_count: int


class GrantNotFound(Struct, frozen=True):
    execution_id: ExecutionId
