"""Unblock: a pass over all limits that hold executions."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class Unblock(Duty):
    """Makes executions claimable whose limit has room: the backstop behind the calls that make room."""

    interval = timedelta(seconds=5)

    async def run_once(self) -> int:
        return await self.engine.unblock_all()
