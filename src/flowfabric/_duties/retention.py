"""Retention: ended executions are forgotten."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class Retention(TimerDuty):
    """Forgets ended executions when their retention is over."""

    kind = TimerKind.RETENTION
    interval = timedelta(seconds=60)
