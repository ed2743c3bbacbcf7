"""Execution deadline: executions that took too long as a whole expire."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class ExecutionDeadline(TimerDuty):
    """Expires executions that took too long as a whole, whatever they are doing."""

    kind = TimerKind.DEADLINE
    interval = timedelta(seconds=5)
