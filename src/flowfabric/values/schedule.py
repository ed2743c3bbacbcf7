"""Schedules as they are stored. `timing` says when they fire."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import Struct

from flowfabric.values.ids import ExecutionId


class Schedule(Struct, frozen=True, kw_only=True):
    """A stored schedule."""

    name: str
    kind: str
    timing: dict[str, Any]
    catch_up: str
    options: dict[str, Any]
    paused: bool
    next_at: datetime | None
    last_at: datetime | None
    last_execution_id: ExecutionId | None
    created_at: datetime
    updated_at: datetime
    payload: bytes
    payload_encoding: str | None = None


class DueSchedule(Struct, frozen=True, kw_only=True):
    """A schedule that is due, with the database's time.

    `live_id` is its last execution, if the schedule minds an overlap and that has not ended.
    """

    name: str
    kind: str
    timing: dict[str, Any]
    catch_up: str
    payload: bytes
    payload_encoding: str | None
    options: dict[str, Any]
    due_at: datetime
    now: datetime
    live_id: ExecutionId | None = None
