"""Lanes, their states and their figures."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct


class LaneState(StrEnum):
    """Whether a lane accepts and hands out work."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    DISABLED = "disabled"


class Lane(Struct, frozen=True, kw_only=True):
    lane_id: str
    state: LaneState
    registered_at: datetime
    registered_by: str


class LaneStats(Struct, frozen=True, kw_only=True):
    """The work of a lane: `depth` executions may be claimed now, the oldest of them exists for `oldest_age`.

    `waiting_children` are parked until other executions end. A flow counts its members that wait for dependencies.
    """

    lane_id: str
    state: LaneState
    depth: int
    oldest_age: timedelta | None
    delayed: int
    waiting_children: int
    running: int


class Prepared(Struct, frozen=True):
    """The result of `prepare`: nothing, or a description of its changes."""

    applied: str | None = None
