"""Hook submission: submit the tasks that executions name for a failure or an escalation."""

from __future__ import annotations

import logging
from datetime import timedelta

from flowfabric._duties.timer import WokenDuty
from flowfabric.engine.timers import Round

log = logging.getLogger("flowfabric.duties")


class HookSubmission(WokenDuty):
    """Submits the tasks that `on_failure` and `on_escalate` name, after failures, expiries and escalations."""

    interval = timedelta(seconds=1)

    async def round(self) -> Round:
        done = await self.engine.submit_hooks(low_water=self.low_water)
        if done.failed:
            log.warning("%s: %d not submitted, the last because: %s", self.name, done.failed, done.message)
        return done
