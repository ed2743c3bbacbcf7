"""Retention: delete ended executions."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class Retention(TimerDuty):
    """Deletes ended executions when their retention has ended."""

    kind = TimerKind.RETENTION
    interval = timedelta(seconds=60)
