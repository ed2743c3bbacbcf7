"""Suspension timeout: suspensions whose time is over end as they asked for."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class SuspensionTimeout(TimerDuty):
    """Ends suspensions whose time is over, as each of them asked for."""

    kind = TimerKind.SUSPENSION
    interval = timedelta(seconds=2)
    batch = 50
