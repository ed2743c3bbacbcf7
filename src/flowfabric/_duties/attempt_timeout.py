"""Attempt timeout: end attempts that ran longer than allowed."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class AttemptTimeout(TimerDuty):
    """Ends attempts that ran longer than allowed; the retry policy decides whether another follows."""

    kind = TimerKind.ATTEMPT
    interval = timedelta(seconds=2)
