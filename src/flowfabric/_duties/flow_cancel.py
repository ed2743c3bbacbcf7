"""Flow cancel: cancel the members of cancelled flows."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round

log = logging.getLogger("flowfabric.duties")


class FlowCancel(WokenDuty):
    """Cancels the members of cancelled flows that the caller left."""

    interval = timedelta(seconds=15)

    async def round(self) -> Round:
        done = await self.engine.reconcile_cancellations(low_water=self.low_water)
        if done.failed:
            log.warning("%s: %d members could not be cancelled: %s", self.name, done.failed, done.message)
        return done
