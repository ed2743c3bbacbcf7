"""Worker registry TTL sweep: remove workers that have not been heard from."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class WorkerRegistryTtlSweep(Duty):
    """Removes workers from the registry whose time to live has passed; they count as absent before."""

    interval = timedelta(seconds=30)
    batch = 1000

    async def run_once(self) -> int:
        removed = 0
        while batch := await self.engine.sweep_workers(limit=self.batch):
            removed += batch
            if batch < self.batch or self.stopping.is_set():
                break
        return removed
