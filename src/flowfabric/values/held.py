"""Executions that a limit holds back, and how often claims were denied."""

from __future__ import annotations

from datetime import datetime
from typing import Literal
from uuid import UUID

from msgspec import Struct

from flowfabric.values.ids import ExecutionId


class Held(Struct, frozen=True, kw_only=True):
    """An execution that waits for a budget or a quota.

    `key` is the value of the quota's key, `default` without one and empty for a budget. `retry_at` is when the window
    of a rate has room again, `needs` are the amounts that an execution waits for which paused while it ran. `rank` is
    its position among those that the limit holds.
    """

    execution_id: ExecutionId
    execution_kind: str
    lane_id: str
    namespace: str
    limit_id: UUID
    key: str
    rank: int
    created_at: datetime
    blocked_at: datetime | None
    retry_at: datetime | None
    needs: dict[str, int]
    detail: str | None


class HeldCount(Struct, frozen=True, kw_only=True):
    """How many executions of a lane a limit holds."""

    lane_id: str
    limit_id: UUID
    what: Literal["budget", "quota"]
    name: str
    count: int


class Denial(Struct, frozen=True, kw_only=True):
    """Executions that one claim moved aside for one reason; `dimension` is that of the budget, empty for quotas."""

    denied_at: datetime
    lane_id: str
    reason: Literal["budget", "rate", "concurrency"]
    dimension: str
    count: int


class Denials(Struct, frozen=True, kw_only=True):
    """How many executions claims moved aside: by dimension of the budget, by rates and by caps on concurrency."""

    budgets: dict[str, int]
    rate: int
    concurrency: int
