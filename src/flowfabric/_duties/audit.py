"""Audit: check the invariants of a few executions at a time."""

from __future__ import annotations

import logging
import random
from datetime import timedelta

from flowfabric._duties.duty import Duty

log = logging.getLogger("flowfabric.duties")


class Audit(Duty):
    """Checks the invariants of a few executions at a time and reports violations.

    It repairs one: ready executions that no claim would find.
    """

    interval = timedelta(seconds=45)
    batch = 100

    async def run_once(self) -> int:
        partition = random.randrange(self.engine.flow_partitions)  # noqa: S311 - a sample
        found = await self.engine.audit_sample(partition, limit=self.batch)
        for violation in found[:10]:
            log.error("audit: %s of %s: %s", violation.rule, violation.execution_id, violation.detail)
        repaired = await self.engine.repair_floors(limit=self.batch)
        for execution_id in repaired:
            log.error("audit: no claim would have found %s, nor what follows it in its queue; repaired", execution_id)
        return len(found) + len(repaired)
