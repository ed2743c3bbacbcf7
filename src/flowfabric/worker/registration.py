"""The worker's row in the registry: it says who is there, and what this worker serves.

The second thread registers, keeps the registration alive and removes it, even while handlers block the loop.
A heartbeat is part of a call that the worker makes anyway, an announcement of a sleep or a renewal of leases, and is a
call of its own only if there is none in time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import flowfabric
from flowfabric.engine import Engine
from flowfabric.errors import FlowFabricError
from flowfabric.values.worker import Heartbeat, OwnWorker, Refreshed

if TYPE_CHECKING:
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")
_SHORTEST_TTL = timedelta(seconds=1)
_CARRIED_FROM = 0.75  # of a period: from then on another call carries the heartbeat
_ALONE_FROM = 1.25  # of a period: from then on it is a call of its own
_LAST_CALL = 1.0  # seconds for the call that removes it; otherwise it lapses


class Registration:
    """Registers a worker, and knows when its next heartbeat is due. Used by both threads of the worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.ttl = max(2 * worker.lease_ttl, _SHORTEST_TTL)
        self._period = self.ttl.total_seconds() / 3
        self._own: OwnWorker | None = None  # since it is registered
        self._beaten_at = 0.0
        self._is_forgotten = False
        self.is_abandoned = False  # the worker ends like a killed process: the registration is left to lapse

    async def register(self, engine: Engine) -> None:
        """Register; `Conflict` if another process has this instance id and lives."""
        worker = self._worker
        asked = time.monotonic()
        await engine.register_worker(
            worker.worker_id,
            worker.instance_id,
            lanes=list(worker.lanes),
            kinds=worker.serving,
            capabilities=worker.capabilities,
            namespace=worker.namespace or "",
            liveness_ttl=self.ttl,
            slots=worker.concurrency,
            package_version=flowfabric.__version__,
            host=socket.gethostname()[:200],
            pid=os.getpid(),
            exclusive=True,
        )
        self._beaten_at, self._is_forgotten = asked, False
        self._own = OwnWorker(
            worker_instance_id=worker.instance_id, process=engine.instance, namespace=worker.namespace or ""
        )

    def due(self) -> OwnWorker | None:
        """Return in whose name a call of the worker should carry a heartbeat; None if none is due."""
        if self._is_forgotten or time.monotonic() - self._beaten_at < self._period * _CARRIED_FROM:
            return None
        return self._own

    def silent_for(self) -> float:
        """Return the seconds since the database took the last heartbeat."""
        return time.monotonic() - self._beaten_at

    def clock_moved(self) -> None:
        """Send a heartbeat soon: by the database's clock the worker may have been silent for too long."""
        self._beaten_at = -math.inf

    def beaten(self, asked: float, outcome: Heartbeat | None) -> None:
        """A call that was sent at `asked` carried a heartbeat, with this outcome."""
        if isinstance(outcome, Refreshed):
            self._beaten_at = max(self._beaten_at, asked)
        elif outcome is not None:
            self._is_forgotten = True

    async def keep(self, engine: Engine) -> None:
        """Register again if the worker was forgotten; send a heartbeat if no other call has carried one in time.

        `Conflict` if another process has taken the instance id.
        """
        if self._own is None or self.is_abandoned:
            return
        asked = time.monotonic()
        if not self._is_forgotten:
            if asked - self._beaten_at < self._period * _ALONE_FROM:
                return
            async with asyncio.timeout(max(self._period, 0.5)):
                self.beaten(asked, await engine.heartbeat_own(self._own))
        if self._is_forgotten:
            async with asyncio.timeout(max(self._period, 0.5)):
                await self.register(engine)
            log.info("worker %s was not in the registry any more and registered again", self._worker.instance_id)

    async def leave(self, engine: Engine) -> None:
        """Remove it from the registry: the worker stops."""
        if self._own is None or self.is_abandoned:
            return
        self._own = None
        try:
            async with asyncio.timeout(_LAST_CALL):
                await engine.leave_registry(
                    self._worker.instance_id, namespace=self._worker.namespace or "", reason="stopped"
                )
        except (FlowFabricError, TimeoutError) as error:
            if not engine.outage.covers(error):
                log.warning("the worker could not leave the registry: %s", error)
