"""Child cancel: cancel what cancelled and expired executions submitted."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round

log = logging.getLogger("flowfabric.duties")


class ChildCancel(WokenDuty):
    """Cancels the children of cancelled and expired executions that the caller left."""

    interval = timedelta(seconds=1)

    async def round(self) -> Round:
        done = await self.engine.cancel_children(low_water=self.low_water)
        if done.failed:
            log.warning("%s: %d children could not be cancelled: %s", self.name, done.failed, done.message)
        return Round(handled=done.cancelled, failed=done.failed, message=done.message, more=done.more)
