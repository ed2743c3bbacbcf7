"""Parked promotion: parked executions wake that the end of the awaited one could not wake."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import TimerDuty
from flowfabric.engine.timers import TimerKind


class ParkedPromotion(TimerDuty):
    """Wakes parked executions that whoever ended the awaited one found in somebody else's hands."""

    kind = TimerKind.PARKED
    interval = timedelta(milliseconds=750)
