"""Unblock: look again at what keeps waiting executions from a worker."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class Unblock(Duty):
    """Makes executions claimable whose limit has room, and stores which routes no live worker covers.

    The backstop behind the calls that make room, and behind the workers that come and go.
    """

    interval = timedelta(seconds=5)

    async def run_once(self) -> int:
        return await self.engine.unblock_all() + await self.engine.judge_routes()
