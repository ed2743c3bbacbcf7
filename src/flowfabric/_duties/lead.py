"""Which process runs the duties: one leads them all, and a second one the cascades.

A leader renews its lease while it lives. The others poll again when it has passed, so that due work is at most a few
seconds late after a leader's death. Two leaders at a time do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta

from flowfabric._duties.watcher import Watcher
from flowfabric._waiting import first_of
from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError

log = logging.getLogger("flowfabric.duties")
DUTIES = "duties"
CASCADES = "cascades"
_LEASE = timedelta(seconds=3)
_GIVEN_BACK = timedelta(milliseconds=1)
_MAX_PAUSE = 5.0  # seconds between polls that fail
_SPREAD = 0.5  # seconds over which the processes spread their polls


class Leadership:
    """Takes and keeps the lead where it can. `leads[name]` is set while this process leads the group."""

    def __init__(self, engine: Engine, watcher: Watcher | None = None) -> None:
        self._engine = engine
        self._watcher = watcher
        self.leads = {DUTIES: asyncio.Event(), CASCADES: asyncio.Event()}

    async def run(self, stopping: asyncio.Event) -> None:
        """Take the lead whenever no other process has it, until `stopping`."""
        trouble = 0
        while not stopping.is_set():
            pause = min(_LEASE.total_seconds() / 3 * 2.0**trouble, _MAX_PAUSE)
            try:
                pause = await self._look()
                trouble = 0
            except Exception as error:
                trouble = min(trouble + 1, 10)
                if not self._engine.outage.covers(error):
                    known = isinstance(error, FlowFabricError)
                    log.warning("leading the duties: %s; trying again in %.0f s", error, pause, exc_info=not known)
                self.resign()
            await first_of(pause, stopping)

    async def _look(self) -> float:
        """Poll once; returns the seconds until the next poll."""
        async with asyncio.timeout(_LEASE.total_seconds()):
            # One process leads one group: the duties if it can, else the cascades.
            wanted = [CASCADES] if self.leads[CASCADES].is_set() else []
            found = await self._engine.take_lead([DUTIES, *wanted], _LEASE)
            if not found[DUTIES].is_ours and not wanted:
                found |= await self._engine.take_lead([CASCADES], _LEASE)
            elif found[DUTIES].is_ours and wanted:
                # The leader died; another process may help with the cascades now.
                await self._engine.take_lead([CASCADES], _GIVEN_BACK)
                del found[CASCADES]
        for name, event in self.leads.items():
            self._set(name, event, name in found and found[name].is_ours)
        if any(event.is_set() for event in self.leads.values()):
            return _LEASE.total_seconds() / 3
        # If a lease seems longer, the server's clock was set back; its holder renews it in time, or died.
        left = min(_LEASE, *(lead.left for lead in found.values()))
        return left.total_seconds() + random.uniform(0.05, _SPREAD)  # noqa: S311 - spreads them

    def resign(self) -> None:
        """Lead nothing any more."""
        for name, event in self.leads.items():
            self._set(name, event, False)

    def _set(self, name: str, event: asyncio.Event, is_ours: bool) -> None:
        if event.is_set() == is_ours:
            return
        if is_ours:
            event.set()
        else:
            event.clear()
        if self._watcher is not None:
            self._watcher.leads(name, is_ours)
