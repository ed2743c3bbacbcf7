"""Unblock: look again at what keeps waiting executions from a worker."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class Unblock(Duty):
    """Stores which routes no live worker covers, and forgets what is no longer so."""

    interval = timedelta(seconds=5)

    async def run_once(self) -> int:
        return await self.engine.judge_routes()
