"""Delayed promotion: make delayed executions claimable when they are due."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class DelayedPromotion(TimerDuty):
    """Makes delayed executions claimable when they are due."""

    kind = TimerKind.DELAY
    interval = timedelta(milliseconds=750)
