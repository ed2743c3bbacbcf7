"""Suspension timeout: end suspensions whose timeout expired."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class SuspensionTimeout(TimerDuty):
    """Ends suspensions whose timeout expired, each with its own timeout behaviour."""

    kind = TimerKind.SUSPENSION
    interval = timedelta(seconds=2)
    batch = 50
