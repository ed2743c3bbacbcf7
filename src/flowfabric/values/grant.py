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


class NotReclaimable(Struct, frozen=True):
    execution_id: ExecutionId
    detail: str


class ReclaimCapExceeded(Struct, frozen=True):
    """The lease was lost too often, so the execution failed."""

    execution_id: ExecutionId
    reclaim_count: int


class GrantNotFound(Struct, frozen=True):
    execution_id: ExecutionId
