"""Attempt timeout: attempts that ran longer than they may end."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class AttemptTimeout(TimerDuty):
    """Ends attempts that ran longer than they may; the retry policy decides what follows."""

    kind = TimerKind.ATTEMPT
    interval = timedelta(seconds=2)
