"""Unblock: check again what keeps waiting executions from a worker, and count what claims were denied."""

from __future__ import annotations

import logging
import math
import time
from datetime import datetime, timedelta
from uuid import UUID

from flowfabric._duties.paged import PagedDuty

log = logging.getLogger("flowfabric.duties")
_FIRST = UUID(int=0), ""
_COUNT_ALL = 300.0  # seconds


class Unblock(PagedDuty[tuple[UUID, str]]):
    """Makes executions claimable whose limit has room, and stores which routes no live worker covers.

    Counts what claims were denied, with a debug line for each.

    With a filter it makes only matching executions claimable. Routes and counts have no tenant.

    The backstop behind the calls that make room, and behind the workers that come and go.
    """

    interval = timedelta(seconds=5)
    allowance = 0.2
    _low_water: datetime | None = None  # denials from before it are counted
    _count_all_at = -math.inf

    async def run_once(self) -> int:
        """Judge the routes, count denials, and check the limits that hold executions."""
        changed = await self.engine.judge_routes()
        await self._count_denials()
        return changed + await super().run_once()

    async def page(self, after: tuple[UUID, str] | None) -> tuple[int, tuple[UUID, str] | None]:
        done = await self.engine.unblock_limited(limit=self.batch, after=after or _FIRST, filter=self.filter)
        self.report(done.failed, done.message)
        return done.promoted, None if done.looked < self.batch else done.last

    async def _count_denials(self) -> None:
        size = 1000
        # As TimerRunner does.
        if (now := time.monotonic()) >= self._count_all_at:
            self._low_water, self._count_all_at = None, now + _COUNT_ALL
        while denials := await self.engine.count_denials(limit=size, low_water=self._low_water):
            self._low_water = denials[-1].denied_at - timedelta(minutes=1)
            for one in denials:
                log.debug(
                    "a claim of lane %r moved %d executions aside at %s: %s",
                    one.lane_id, one.count, one.denied_at.isoformat(),
                    f"budgets without {one.dimension}" if one.reason == "budget" else f"quotas, {one.reason}",
                )  # fmt: skip
            if len(denials) < size or self.stopping.is_set():
                break
