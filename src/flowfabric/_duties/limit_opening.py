"""Limit opening: make claimable what a limit has room for, when it is due."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round


class LimitOpening(WokenDuty):
    """Makes executions claimable when the window of a rate has room, and after ends that found their limit locked."""

    interval = timedelta(seconds=1)
    batch = 100
    is_for_all = True

    async def round(self) -> Round:
        done = await self.engine.unblock_limited(limit=self.batch, low_water=self.low_water)
        self.report(done.failed, done.message)
        return Round(handled=done.promoted, failed=done.failed, message=done.message, more=done.looked == self.batch)
