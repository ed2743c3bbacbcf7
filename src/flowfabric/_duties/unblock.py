"""Unblock: look again at what keeps waiting executions from a worker."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from flowfabric._duties.duty import Duty


class Unblock(Duty):
    """Makes executions claimable whose limit has room, and stores which routes no live worker covers.

    The backstop behind the calls that make room, and behind the workers that come and go.
    """

    interval = timedelta(seconds=5)
    batch = 100

    async def run_once(self) -> int:
        changed = await self.engine.judge_routes()
        after = UUID(int=0), ""
        while True:
            done = await self.engine.unblock_limited(limit=self.batch, after=after)
            changed += done.promoted
            if done.looked < self.batch or done.last is None or self.stopping.is_set():
                return changed
            after = done.last
