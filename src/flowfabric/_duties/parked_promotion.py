"""Parked promotion: wake parked executions that were locked when the execution they wait for ended."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class ParkedPromotion(TimerDuty):
    """Wakes parked executions that another transaction had locked when the execution they wait for ended."""

    kind = TimerKind.PARKED
    interval = timedelta(milliseconds=750)
