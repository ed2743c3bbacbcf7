"""Sibling cancel: cancel upstreams that a decided join no longer needs."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round

log = logging.getLogger("flowfabric.duties")


class SiblingCancel(WokenDuty):
    """Cancels the upstreams that a decided join no longer needs."""

    interval = timedelta(seconds=1)

    async def round(self) -> Round:
        done = await self.engine.cancel_siblings(low_water=self.low_water)
        if done.failed:
            log.warning("%s: %d siblings could not be cancelled: %s", self.name, done.failed, done.message)
        # Locked groups went to the end of the queue and can wait for the next round.
        more = done.action not in ("none", "busy")
        return Round(
            handled=done.cancelled + done.already_terminal, failed=done.failed, message=done.message, more=more
        )
