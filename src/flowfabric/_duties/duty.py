"""The loop that every duty shares: interval, punctuality, back-off, clean stop.

A duty implements one round and returns how much it did. Any number of processes may run the same duty: each takes
rows that no other has locked, and a crash in the middle of a round rolls the round back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta

from flowfabric._duties.watcher import Watcher
from flowfabric._waiting import first_of
from flowfabric.engine import Engine
from flowfabric.engine.timers import Round
from flowfabric.errors import FlowFabricError
from flowfabric.values.page import ScannerFilter

log = logging.getLogger("flowfabric.duties")
_RESTART_AFTER = 5.0
_MAX_PAUSE = 5.0  # between rounds that fail
_FLOOR = 0.1


class Duty:
    """A background duty. Subclasses set `interval` and implement `run_once`.

    A duty has one name: `LeaseExpiry` is `lease_expiry` in logs, in metrics, in the glossary, and as a file.
    """

    name: str = "duty"
    interval: timedelta = timedelta(seconds=60)
    is_for_all: bool = False  # takes work of all tenants: it does not run with a filter

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, engine: Engine, *, filter: ScannerFilter | None = None) -> None:  # noqa: A002
        self.engine = engine
        self.filter = filter
        self.stopping = asyncio.Event()
        self.watcher: Watcher | None = None

    async def watched(self, proceed: Callable[[], Awaitable[Round]]) -> Round:
        """Run one round and let the watcher know."""
        return await (proceed() if self.watcher is None else self.watcher.round(self.name, proceed))

    def report(self, failed: int, message: str | None) -> None:
        """Warn of items that failed alone and are tried again later."""
        if failed:
            log.warning("%s: %d postponed, the last because: %s", self.name, failed, message)

    async def count(self, part: str, handled: int) -> None:
        """Let the watcher know what a part of this duty did, under a name of its own."""

        async def done() -> Round:
            return Round(handled=handled)

        if self.watcher is not None:
            await self.watcher.round(part, done)

    async def _whole_round(self) -> Round:
        return Round(handled=await self.run_once())

    async def run_once(self) -> int:
        """Run one round; returns how many items it handled. A long round checks `stopping` between its batches."""
        raise NotImplementedError

    async def until_next(self) -> float:
        """Return the seconds until the next round; at most the interval."""
        return self.interval.total_seconds()

    async def run(
        self, stopping: asyncio.Event, woken: asyncio.Event | None = None, *, while_: asyncio.Event | None = None
    ) -> None:
        """Run rounds until `stopping`, and while `while_` is set, each when something is due or the interval ends."""
        self.stopping = stopping
        trouble = 0
        while not stopping.is_set() and (while_ is None or while_.is_set()):
            pause = _RESTART_AFTER
            try:
                if woken is not None:
                    woken.clear()
                done = await self.watched(self._whole_round)
                if done.handled:
                    log.debug("%s handled %d", self.name, done.handled)
                pause = await self.until_next()
                trouble = 0
            except FlowFabricError as error:
                pause = min(2.0**trouble, _MAX_PAUSE)
                trouble = min(trouble + 1, 10)
                if not self.engine.outage.covers(error):
                    log.warning("%s: %s; trying again in %.0f s", self.name, error, pause)
            except Exception:
                log.exception("%s failed; it runs again in %.0f s", self.name, _RESTART_AFTER)
            # Never early: a round just before the time would find nothing.
            pause = max(pause, _FLOOR) * random.uniform(1.0, 1.05)  # noqa: S311 - spreads the processes
            await first_of(pause, stopping, woken)
