"""Registry event trimmer: remove old events of workers."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class RegistryEventTrimmer(Duty):
    """Removes events of workers when their retention has ended."""

    interval = timedelta(seconds=60)
    batch = 500

    async def run_once(self) -> int:
        removed = 0
        while batch := await self.engine.trim_worker_events(limit=self.batch):
            removed += batch
            if batch < self.batch or self.stopping.is_set():
                break
        return removed
