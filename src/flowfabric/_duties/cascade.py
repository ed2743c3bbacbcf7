"""Cascade: resolve the edges that ended members left unresolved."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round

log = logging.getLogger("flowfabric.duties")


class Cascade(WokenDuty):
    """Resolves edges that ended members left unresolved: large fan-outs, skips after skips, locked groups."""

    interval = timedelta(seconds=1)
    _after: int | None = None

    async def round(self) -> Round:
        done = await self.engine.dispatch_cascades(after=self._after, low_water=self.low_water, filter=self.filter)
        if done.failed:
            log.warning("%s: %d ends failed, the last because: %s", self.name, done.failed, done.message)
        # Ends that could not be resolved stay first in the queue; continue after them until the queue is done.
        stuck = done.seen > 0 and done.finished + done.resolved == 0
        self._after = done.last_event if stuck and done.more else None
        return Round(handled=done.finished + done.resolved, failed=done.failed, message=done.message, more=done.more)
