"""Record expiry: remove idempotency records, grants, watches, event segments and keys that expired, and empty flows."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class RecordExpiry(Duty):
    """Removes expired idempotency records, grants, watches, event segments, keys and kept answers, and empty flows.

    Metrics count grants and keys of usage also as `grant_sweeper` and `usage_dedup_sweeper`.
    """

    interval = timedelta(seconds=30)
    batch = 1000

    async def run_once(self) -> int:
        removed = grants = usage_keys = 0
        while True:
            swept = await self.engine.sweep(limit=self.batch)
            removed += swept.total
            grants += swept.grants
            usage_keys += swept.usage_keys
            if swept.total < self.batch or self.stopping.is_set():
                break
        await self.count("grant_sweeper", grants)
        await self.count("usage_dedup_sweeper", usage_keys)
        return removed
