"""Delayed promotion: delayed executions become claimable when their time has come."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class DelayedPromotion(TimerDuty):
    """Makes delayed executions claimable when their time has come."""

    kind = TimerKind.DELAY
    interval = timedelta(milliseconds=750)
