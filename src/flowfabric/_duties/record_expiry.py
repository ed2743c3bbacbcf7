"""Record expiry: remove idempotency records, grants, watches, event segments and keys that expired, and empty flows."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class RecordExpiry(Duty):
    """Removes expired idempotency records, grants, watches, event segments, keys and kept answers, and empty flows."""

    interval = timedelta(seconds=30)
    batch = 1000

    async def run_once(self) -> int:
        removed = 0
        while batch := await self.engine.sweep(limit=self.batch):
            removed += batch
            if batch < self.batch or self.stopping.is_set():
                break
        return removed
