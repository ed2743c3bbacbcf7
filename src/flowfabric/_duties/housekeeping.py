"""The duties that look after the house: old records, and whether everything is as it must be."""

from __future__ import annotations

import logging
import random
from datetime import timedelta

from flowfabric._duties.duty import Duty

log = logging.getLogger("flowfabric.duties")


class Sweep(Duty):
    """Removes idempotency records, grants and event segments whose time is over."""

    name = "sweeper"
    interval = timedelta(seconds=30)
    batch = 1000

    async def run_once(self) -> int:
        removed = 0
        while batch := await self.engine.sweep(limit=self.batch):
            removed += batch
            if batch < self.batch or self.stopping.is_set():
                break
        return removed


class Audit(Duty):
    """Looks at one partition at a time for what must never be; reports, repairs nothing."""

    name = "index_reconciler"
    interval = timedelta(seconds=45)

    async def run_once(self) -> int:
        partition = random.randrange(self.engine.flow_partitions)  # noqa: S311 - a sample
        found = await self.engine.audit(partition)
        for violation in found[:10]:
            log.error("audit: %s of %s: %s", violation.rule, violation.execution_id, violation.detail)
        return len(found)
