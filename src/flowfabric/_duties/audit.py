"""Audit: check the invariants of one partition at a time."""

from __future__ import annotations

import logging
import random
from datetime import timedelta

from flowfabric._duties.duty import Duty

log = logging.getLogger("flowfabric.duties")


class Audit(Duty):
    """Checks the invariants of one partition at a time; reports violations and repairs nothing."""

    interval = timedelta(seconds=45)

    async def run_once(self) -> int:
        partition = random.randrange(self.engine.flow_partitions)  # noqa: S311 - a sample
        found = await self.engine.audit(partition)
        for violation in found[:10]:
            log.error("audit: %s of %s: %s", violation.rule, violation.execution_id, violation.detail)
        return len(found)
