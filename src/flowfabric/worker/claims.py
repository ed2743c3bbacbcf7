"""Claiming: as many executions as there are free slots, from the lanes by their weights, as soon as there is work.

The worker starts claimed executions. A failed claim is repeated, with growing pauses, until it succeeds.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from flowfabric._waiting import first_of
from flowfabric.errors import Contention, Corruption, FlowFabricError, InvalidInput, WorkerAtCapacity
from flowfabric.values.attempt import Claimed
from flowfabric.values.checks import check_lane
from flowfabric.values.grant import ClaimGrant, GrantNotFound, ReclaimGrant, ResumeGrant
from flowfabric.values.ids import ExecutionId, mint_uuid

if TYPE_CHECKING:
    from flowfabric.worker.worker import Worker

log = logging.getLogger("flowfabric.worker")
_FIRST_PAUSE = 0.2
_MAX_PAUSE = 5.0
_FEW = 8
_SECOND_POLL = 0.05  # seconds after the poll that follows an announcement
_LONG_SLEEP = 10.0  # seconds that a worker without work announces at a time
_DENIED_LONG = 0.2  # seconds after which a claim that moves denied executions aside returns without having seen all
_OVERLAP = 0.25  # seconds that an announcement lasts longer than its sleep, so that there is no gap before the next
_LONGEST_SLEEP = 60.0 - _OVERLAP  # announcements end after a minute, however long they were to last


class Claims:
    """The loop that claims, until the worker stops."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._trouble = 0
        self._is_reported = False  # the log says that claims fail
        self._damage = ""  # what the log says is damaged
        self._asleep: datetime | None = None  # until when submissions see that this worker sleeps
        self._announced_until = 0.0
        self._announced_on = -1  # the listener's connection number
        self._next_poll = 0.0
        self._has_slept = False  # before this round
        self._shares = Shares(worker.lanes)
        self._kinds = worker.serving
        self.idle_since: float | None = None
        self._asked_at = 0.0  # when the last claim that was answered began
        self._again = asyncio.Event()
        self._reserved = 0  # slots of grants that are being consumed

    async def consume(self, grant: ClaimGrant) -> ExecutionId:
        """Claim the execution of a grant and start its handler. Without a free slot the grant is not touched."""
        worker = self._worker
        if self.free_slots <= 0:
            raise WorkerAtCapacity(worker.concurrency, execution_id=grant.execution_id)
        asked = time.monotonic()
        self._reserved += 1
        try:
            claimed = await self._claim_granted(grant)
            if claimed.execution_kind not in worker.tasks:
                await worker.engine.release(claimed.handle)
                raise InvalidInput(
                    f"is for {claimed.execution_kind}, which this worker does not run",
                    field="grant",
                    allowed=f"a grant for one of {', '.join(sorted(worker.tasks))}",
                )
        finally:
            self._reserved -= 1
            worker.slot_free.set()
        self._begin([claimed], asked)
        return claimed.execution_id

    async def _claim_granted(self, grant: ClaimGrant) -> Claimed:
        worker = self._worker
        given: dict[str, Any] = {
            "worker_id": worker.worker_id,
            "worker_instance_id": worker.instance_id,
            "lease_ttl": worker.lease_ttl,
            "lease_id": mint_uuid(),
            "grant_key": grant.grant_key,
        }
        target = grant.execution_id
        if isinstance(grant, ReclaimGrant):
            taken = await worker.engine.reclaim_execution(target, attempt_id=mint_uuid(), **given)
            if isinstance(taken, Claimed):
                return taken
            kind = "invalid_claim_grant" if isinstance(taken, GrantNotFound) else "execution_not_leaseable"
            raise Contention(kind, "another worker was faster, or the grant expired", execution_id=target)
        if not isinstance(grant, ResumeGrant):
            try:
                return await worker.engine.claim_execution(target, attempt_id=mint_uuid(), **given)
            except Contention as error:
                if error.kind != "use_claim_resumed_execution":
                    raise
        return await worker.engine.claim_resumed_execution(target, **given)

    def _begin(self, claimed: list[Claimed], asked: float) -> None:
        worker = self._worker
        had_leases = bool(worker.handlers.held)
        worker.handlers.begin(claimed, asked)
        if not had_leases:
            worker.second_thread.leases_begin()

    async def claim(self, limit: int) -> list[Claimed]:
        """Claim up to this many executions."""
        worker = self._worker
        given: dict[str, Any] = {
            "limit": limit,
            "worker_id": worker.worker_id,
            "worker_instance_id": worker.instance_id,
            "capabilities": worker.capabilities,
            "kinds": self._kinds,
            "namespace": worker.namespace,
            "lease_ttl": worker.lease_ttl,
            "asleep": self._asleep,
        }
        if len(worker.lanes) == 1:
            return await worker.engine.claim_many(next(iter(worker.lanes)), **given)
        return await worker.engine.claim_lanes(self._shares.of(limit), **given)

    @property
    def free_slots(self) -> int:
        """How many more may be claimed; none while results cannot be reported."""
        worker = self._worker
        if worker.reports.pending >= max(1000, 2 * worker.concurrency):
            return 0
        return worker.concurrency - len(worker.handlers.running) - self._reserved

    async def run(self) -> None:
        """Claim as many as fit, repeatedly; without work, sleep until a submission or the next poll."""
        worker = self._worker
        # Half at a time: while one half starts, the other is claimed.
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
                self._again.clear()
                try:
                    pause = await self._round(min(free, most), woken is not None)
                except Exception as error:
                    self._trouble += 1
                    pause = min(_FIRST_PAUSE * 2 ** min(self._trouble - 1, 10), _MAX_PAUSE)
                    pause *= random.uniform(0.5, 1)  # noqa: S311 - spreads the workers
                    if not worker.engine.outage.covers(error):
                        self._is_reported = True
                        known = isinstance(error, FlowFabricError)
                        log.warning("a claim failed: %s; retrying in %.1f s", error, pause, exc_info=not known)
                    self._announced_on = -1
                    await first_of(pause, worker.stopping)
                else:
                    self._has_slept = pause > 0
                    if pause:
                        await first_of(pause, worker.stopping, woken, self._again)

    async def _round(self, limit: int, is_told: bool) -> float:
        """Claim once; returns how long to sleep. `is_told`: submissions notify workers that announced a sleep."""
        worker = self._worker
        asked = time.monotonic()
        try:
            claimed = await self.claim(limit)
            self._damage = self._damage if claimed else ""
        except Corruption as error:
            # All that waits needs something that is damaged. Other work still wakes this worker at once.
            if str(error) != self._damage:
                log.warning("executions are not claimed: %s", error)
            self._damage, claimed = str(error), []
        self._asked_at = asked
        if self._is_reported:
            log.info("claims work again")
        self._trouble, self._is_reported = 0, False
        if claimed:
            self.idle_since = None
            self._asleep, self._announced_until = None, 0.0  # the claim ended the announcement
            self._begin(claimed, asked)
            if len(claimed) <= _FEW:
                await asyncio.sleep(0)  # they start before the next claim
            if is_told and self._has_slept and len(claimed) < limit and (free := self.free_slots) > 0:
                await self._announce(free)  # it was woken for these: probably there is nothing more
            return 0.0
        now = time.monotonic()
        pause = worker.poll
        if is_told:
            if now >= self._announced_until or self._connection != self._announced_on:
                if not await self._announce(limit):
                    return 0.0
                now = time.monotonic()
            # A transaction that looked for sleeping workers before the announcement may commit after our poll:
            # polls at growing intervals find its submission.
            pause = min(max(self._announced_until - now, 0.01), self._next_poll, worker.poll)
            self._next_poll *= 5
        elif now - asked >= _DENIED_LONG:
            pause = min(pause, now - asked)  # there may be work behind what is denied; a server that is just slow rests
        if self.idle_since is None:
            self.idle_since = now
        return pause

    async def look(self) -> None:
        """Wait for the answer to a claim that begins after this call."""
        begun = time.monotonic()
        while self._asked_at <= begun and not self._worker.stopping.is_set():
            self._again.set()
            await asyncio.sleep(0.005)

    @property
    def _connection(self) -> int:
        listener = self._worker.engine.listener
        return 0 if listener is None else listener.connections

    async def _announce(self, slots: int) -> bool:
        """Announce a sleep; then comes a poll, and then the sleep: a submission after that poll sees the announcement.

        Returns whether no poll is needed, because the announcement before lasted until this one was made. A server that
        crashed has lost it, and the listener has a new connection then.
        """
        worker = self._worker
        now, connection, before = time.monotonic(), self._connection, self._announced_until
        sleeps_on = 0 <= now - before < _OVERLAP and connection == self._announced_on
        span = min(max(worker.poll, _LONG_SLEEP) if sleeps_on else worker.poll, _LONGEST_SLEEP)
        lanes, at_most = list(worker.lanes), timedelta(seconds=span + _OVERLAP)
        serves: dict[str, Any] = {"slots": slots, "kinds": self._kinds, "capabilities": worker.capabilities}
        serves["namespace"] = worker.namespace
        if (own := worker.registration.due()) is None:
            self._asleep = await worker.engine.sleep_for_work(lanes, at_most, before=self._asleep, **serves)
        else:
            self._asleep, outcome = await worker.engine.sleep_and_heartbeat(
                lanes, at_most, worker=own, before=self._asleep, **serves
            )
            worker.registration.beaten(now, outcome)
        if not sleeps_on:
            self._next_poll = _SECOND_POLL
        self._announced_until, self._announced_on = now + span, connection
        return sleeps_on and time.monotonic() - before < _OVERLAP and connection == self._connection


class Shares:
    """Divides slots among lanes by weight. Remainders carry over, so that few slots are fair over time."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self._total = sum(weights.values())
        self._owed = dict.fromkeys(weights, 0)
        self._turns = dict.fromkeys(weights, 0)

    def of(self, limit: int) -> dict[str, int]:
        """Return the share of each lane, in the order in which lanes may use what others leave."""
        shares = {}
        for lane, weight in self._weights.items():
            shares[lane], rest = divmod(limit * weight, self._total)
            self._owed[lane] += rest
            self._turns[lane] += weight
        most_owed = [(-owed, place, lane) for place, (lane, owed) in enumerate(self._owed.items())]
        heapq.heapify(most_owed)
        for _ in range(limit - sum(shares.values())):
            owed, place, lane = most_owed[0]
            shares[lane] += 1
            self._owed[lane] -= self._total
            heapq.heapreplace(most_owed, (owed + self._total, place, lane))
        order = sorted(shares, key=self._turns.__getitem__, reverse=True)
        self._turns[order[0]] -= self._total
        return {lane: shares[lane] for lane in order}


def lane_weights(lanes: Sequence[str] | Mapping[str, int]) -> dict[str, int]:
    """Check lanes with their weights; names without weights count the same."""
    if isinstance(lanes, str):
        raise InvalidInput(f"got the string {lanes!r}", field="lanes", allowed="a list of names, or names with weights")
    weights = dict(lanes) if isinstance(lanes, Mapping) else dict.fromkeys(lanes, 1)
    if not weights:
        raise InvalidInput("no lane given", field="lanes", allowed="at least one lane")
    for lane, weight in weights.items():
        check_lane(lane, "lanes")
        if type(weight) is not int or not 1 <= weight <= 100:
            raise InvalidInput(f"{lane} has weight {weight!r}", field="lanes", allowed="1..100")
    return weights
