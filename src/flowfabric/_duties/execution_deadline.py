"""Execution deadline: expire executions that took too long in total."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class ExecutionDeadline(TimerDuty):
    """Expires executions that took too long in total, in any state."""

    kind = TimerKind.DEADLINE
    interval = timedelta(seconds=5)
