"""Durable consumers of the event log, as lists show them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import Struct

from flowfabric.values.event import EventCursor


class ConsumerRecord(Struct, frozen=True, kw_only=True):
    """A durable consumer, and how far behind it is.

    `cursor` is the last event it has passed, and `lag` how many events follow, of all families. `behind_since` is the
    time of the next one; None: there is none. `is_expired`: events after `cursor` were removed, and it stops until an
    operator moves it. `instance`, `host` and `pid` are of the process that works; None: none does.
    """

    name: str
    families: tuple[str, ...]
    filter: dict[str, Any]
    cursor: EventCursor
    lag: int
    behind_since: datetime | None
    is_expired: bool
    handled: int
    created_at: datetime
    moved_at: datetime | None
    failures: int
    failure: str | None
    instance: UUID | None
    host: str | None
    pid: int | None
    retention: timedelta
