"""Waitpoint expiry: expire pending waitpoints."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class WaitpointExpiry(TimerDuty):
    """Expires waitpoints that no suspension used in time."""

    kind = TimerKind.WAITPOINT
    interval = timedelta(seconds=5)
    batch = 100
