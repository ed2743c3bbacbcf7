"""Unblock: a pass over all limits that hold executions."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from flowfabric._duties.duty import Duty


class Unblock(Duty):
    """Makes executions claimable whose limit has room: the backstop behind the calls that make room."""

    interval = timedelta(seconds=5)
    batch = 100

    async def run_once(self) -> int:
        promoted = 0
        after = UUID(int=0), ""
        while True:
            done = await self.engine.unblock_limited(limit=self.batch, after=after)
            promoted += done.promoted
            if done.looked < self.batch or done.last is None or self.stopping.is_set():
                return promoted
            after = done.last
