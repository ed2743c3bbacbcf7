"""Unblock: check again what keeps waiting executions from a worker, and count what claims were denied."""

from __future__ import annotations

import logging
from datetime import timedelta
from uuid import UUID

from flowfabric._duties.duty import Duty

log = logging.getLogger("flowfabric.duties")
_FIRST = UUID(int=0), ""


class Unblock(Duty):
    """Makes executions claimable whose limit has room, and stores which routes no live worker covers.

    Counts what claims were denied, with a debug line for each.

    With a filter it makes only matching executions claimable. Routes and counts have no tenant.

    The backstop behind the calls that make room, and behind the workers that come and go.
    """

    interval = timedelta(seconds=5)
    batch = 100
    _after = _FIRST

    async def run_once(self) -> int:
        """Check one page of the limits that hold executions, and go on while pages have something to promote."""
        changed = await self.engine.judge_routes()
        await self._count_denials()
        while True:
            done = await self.engine.unblock_limited(limit=self.batch, after=self._after, filter=self.filter)
            changed += done.promoted
            self.report(done.failed, done.message)
            self._after = _FIRST if done.last is None or done.looked < self.batch else done.last
            if not done.promoted or self._after == _FIRST or self.stopping.is_set():
                return changed

    async def _count_denials(self) -> None:
        size = 1000
        while denials := await self.engine.count_denials(limit=size):
            for one in denials:
                log.debug(
                    "a claim of lane %r moved %d executions aside at %s: %s",
                    one.lane_id, one.count, one.denied_at.isoformat(),
                    f"budgets without {one.dimension}" if one.reason == "budget" else f"quotas, {one.reason}",
                )  # fmt: skip
            if len(denials) < size or self.stopping.is_set():
                break
