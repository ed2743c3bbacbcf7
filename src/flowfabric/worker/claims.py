"""Claiming: as many executions as there are free slots, from the lanes by their weights, as soon as there is work.

What is claimed is begun by the worker. A claim that fails is made again, with growing pauses, for as long as it takes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from flowfabric._waiting import first_of
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.values.attempt import Claimed
from flowfabric.values.checks import check_lane

if TYPE_CHECKING:
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")
_FIRST_PAUSE = 0.2
_MAX_PAUSE = 5.0
_FEW = 8
_FIRST_LOOK = 0.05
_OVERLAP = 0.25  # seconds by which an announcement outlives its sleep, so that the next one leaves no gap


class Claims:
    """The loop that claims, until the worker stops."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._trouble = 0
        self._announced_until = 0.0
        self._announced_on = -1  # which connection of the listener
        self._next_look = 0.0
        self._shares = Shares(worker.lanes)
        self._kinds = sorted(worker.tasks)
        self.idle_since: float | None = None

    async def claim(self, limit: int) -> list[Claimed]:
        """Take up to so many executions."""
        worker = self._worker
        if len(worker.lanes) == 1:
            return await worker.engine.claim_many(
                next(iter(worker.lanes)),
                limit=limit,
                worker_id=worker.worker_id,
                worker_instance_id=worker.instance_id,
                capabilities=worker.capabilities,
                kinds=self._kinds,
                lease_ttl=worker.lease_ttl,
            )
        return await worker.engine.claim_lanes(
            self._shares.of(limit),
            limit=limit,
            worker_id=worker.worker_id,
            worker_instance_id=worker.instance_id,
            capabilities=worker.capabilities,
            kinds=self._kinds,
            lease_ttl=worker.lease_ttl,
        )

    @property
    def free_slots(self) -> int:
        """How many more may be claimed; none while the database does not take the results."""
        worker = self._worker
        if worker.reports.pending >= max(1000, 2 * worker.concurrency):
            return 0
        return worker.concurrency - len(worker.handlers.running)

    async def run(self) -> None:
        """Claim as many as fit, again and again; when there is nothing, sleep until somebody submits or it is time."""
        worker = self._worker
        # Half at a time: while one half begins, the other is being claimed.
        most = min(max(worker.concurrency // 2, 1), 500)
        with worker.engine.work_wakeups() as woken:
            while not worker.stopping.is_set():
                free = self.free_slots
                if free <= 0:
                    self.idle_since = None
                    worker.slot_free.clear()
                    if self.free_slots <= 0:
                        await worker.slot_free.wait()
                    continue
                if woken is not None:
                    woken.clear()
                try:
                    pause = await self._round(min(free, most), woken is not None)
                except Exception as error:
                    self._trouble += 1
                    pause = min(_FIRST_PAUSE * 2 ** min(self._trouble - 1, 10), _MAX_PAUSE)
                    pause *= random.uniform(0.5, 1)  # noqa: S311 - spreads the workers
                    known = isinstance(error, FlowFabricError)
                    log.warning("a claim failed: %s; again in %.1f s", error, pause, exc_info=not known)
                    self._announced_on = -1
                    await first_of(pause, worker.stopping)
                else:
                    if pause:
                        await first_of(pause, worker.stopping, woken)

    async def _round(self, limit: int, is_told: bool) -> float:
        """Claim once; answers how long to sleep. `is_told`: whoever submits tells those who have announced a sleep."""
        worker = self._worker
        asked = time.monotonic()
        claimed = await self.claim(limit)
        if self._trouble:
            log.info("claims work again")
            self._trouble = 0
        if claimed:
            self.idle_since = None
            worker.handlers.begin(claimed, asked)
            if len(claimed) <= _FEW:
                await asyncio.sleep(0)  # they begin before the next claim is made
            return 0.0
        now = time.monotonic()
        pause = worker.poll
        if is_told:
            listener = worker.engine.listener
            connection = 0 if listener is None else listener.connections
            if now >= self._announced_until or connection != self._announced_on:
                # Announce, look again, then sleep: whoever submits after that look sees the announcement. A server
                # that crashed has forgotten it, and the listener has another connection then.
                await worker.engine.sleep_for_work(timedelta(seconds=worker.poll + _OVERLAP))
                if now >= self._announced_until + _OVERLAP or connection != self._announced_on:
                    self._next_look = _FIRST_LOOK
                self._announced_until, self._announced_on = now + worker.poll, connection
                return 0.0
            # A transaction that looked for sleepers while none was announced may commit after our look: looks that
            # grow rarer find what it submitted.
            pause = min(max(self._announced_until - now, 0.01), self._next_look)
            self._next_look *= 5
        if self.idle_since is None:
            self.idle_since = now
        return pause


class Shares:
    """Divides slots among lanes by weight. What does not divide is owed, so that few slots are fair in time."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self._total = sum(weights.values())
        self._owed = dict.fromkeys(weights, 0)
        self._turns = dict.fromkeys(weights, 0)

    def of(self, limit: int) -> dict[str, int]:
        """The share of each lane, in the order in which they may take what others leave over."""
        shares = {}
        for lane, weight in self._weights.items():
            shares[lane], rest = divmod(limit * weight, self._total)
            self._owed[lane] += rest
            self._turns[lane] += weight
        for _ in range(limit - sum(shares.values())):
            lane = max(self._owed, key=self._owed.__getitem__)
            shares[lane] += 1
            self._owed[lane] -= self._total
        order = sorted(shares, key=self._turns.__getitem__, reverse=True)
        self._turns[order[0]] -= self._total
        return {lane: shares[lane] for lane in order}


def lane_weights(lanes: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """Lanes with their weights, checked; names alone weigh the same."""
    if isinstance(lanes, str):
        raise InvalidInput(f"got the text {lanes!r}", field="lanes", allowed="a list of names, or names with weights")
    weights = dict(lanes) if isinstance(lanes, Mapping) else dict.fromkeys(lanes, 1)
    if not weights:
        raise InvalidInput("no lane named", field="lanes", allowed="at least one lane")
    for lane, weight in weights.items():
        check_lane(lane, "lanes")
        if type(weight) is not int or not 1 <= weight <= 100:
            raise InvalidInput(f"{lane} has weight {weight!r}", field="lanes", allowed="1..100")
    return weights
