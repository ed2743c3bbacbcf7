"""Runs the duties of one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from flowfabric._duties.all import ALL
from flowfabric._duties.cascade import Cascade
from flowfabric._duties.duty import Duty
from flowfabric._duties.intervals import intervals_of
from flowfabric._duties.lead import CASCADES, DUTIES, Leadership
from flowfabric._duties.timer import WokenDuty
from flowfabric._duties.watcher import Watcher
from flowfabric.engine import Engine
from flowfabric.engine.timers import Round
from flowfabric.errors import FlowFabricError
from flowfabric.values.page import ScannerFilter

log = logging.getLogger("flowfabric.duties")
_READ_ALL = 30.0  # seconds, or longer if that takes long
_READ_ALL_AT_MOST = 300.0


class TimerRunner(Duty):
    """Runs the woken duties of one process in one loop, which sleeps until the first timer is due.

    One call returns which of them have work.
    """

    interval = timedelta(milliseconds=750)

    def __init__(self, engine: Engine, duties: Sequence[WokenDuty], given: Collection[str] = ()) -> None:
        super().__init__(engine)
        self._duties = duties
        if any(duty.name in given for duty in duties):
            self.interval = min(duty.interval for duty in duties)
        self._pause = 0.0
        self._announced: datetime | None = None
        self._read_all_at = -math.inf

    async def run_once(self) -> int:
        """Run bounded rounds of each kind that has work until none has more: the backlog of one delays no other."""
        handled = 0
        failure: Exception | None = None
        passed_over: set[WokenDuty] = set()  # their work is locked, or not for us: it waits for the next call
        while not self.stopping.is_set():
            waiting = [duty for duty in await self._with_work() if duty not in passed_over]
            if not waiting:
                break
            for duty in waiting:
                try:
                    done = await duty.watched(duty.round)
                except Exception as error:  # raised below, after the others have run
                    failure = failure or error
                    passed_over.add(duty)
                    continue
                handled += done.handled
                if not done.more:
                    passed_over.add(duty)
        if failure is not None:
            raise failure
        return handled

    async def watched(self, proceed: Callable[[], Awaitable[Round]]) -> Round:
        return await proceed()  # the rounds of its duties are what counts

    async def _with_work(self) -> list[WokenDuty]:
        # Handled rows stay in the index as long as an old snapshot anywhere may see them: polls start after them. The
        # rare polls that start from the beginning, which take a hundredth of the time, find a row whose transaction
        # ended more than a minute later.
        begun = time.monotonic()
        from_the_beginning = begun >= self._read_all_at
        if from_the_beginning:
            for duty in self._duties:
                duty.low_water = None
        found = await self.engine.look_for_due(
            {duty.queue: duty.low_water for duty in self._duties}, at_most=self.interval, before=self._announced
        )
        if from_the_beginning:
            ended = time.monotonic()
            self._read_all_at = ended + min(max(_READ_ALL, 100 * (ended - begun)), _READ_ALL_AT_MOST)
        self._pause, self._announced = found.pause, found.announced
        for duty in self._duties:
            duty.low_water = found.low_water[duty.queue]
        return [duty for duty in self._duties if duty.queue in found.due]

    async def until_next(self) -> float:
        return self._pause


class Duties:
    """All duties of a process: `async with Duties(engine): ...`. Any number of processes may; one of them leads.

    `intervals` says how long duties sleep at most: `{"audit": timedelta(minutes=5)}`, from 0.1 seconds to a day.
    By default `FLOWFABRIC_<DUTY>_INTERVAL` in the environment does; names that this process does not know are logged
    and ignored there. Duties that are woken when something is due share one loop, which sleeps no longer than the
    shortest of their intervals.

    With a `filter`, duties act on matching executions only. `limit_opening` does not run then, because a limit is due
    for all tenants. `unblock` makes matching executions claimable instead: each of its rounds looks at limits for 0.2
    seconds, and the next continues from there. Within its interval that is thousands of limits that hold executions.
    """

    def __init__(
        self,
        engine: Engine,
        duties: Sequence[type[Duty]] = ALL,
        *,
        filter: ScannerFilter | None = None,  # noqa: A002
        watcher: Watcher | None = None,
        intervals: Mapping[str, timedelta] | None = None,
    ) -> None:
        given = intervals_of(intervals, duties)
        made = [duty(engine, filter=filter) for duty in duties if filter is None or not duty.is_for_all]
        second = Cascade(engine)  # for the process that leads only the cascades
        for duty in (*made, second):
            duty.watcher = watcher
            duty.interval = given.get(duty.name, duty.interval)
        timed = [duty for duty in made if isinstance(duty, WokenDuty)]
        self._engine = engine
        # Duties with a filter are not led: other processes have other filters.
        self._leadership = Leadership(engine, watcher) if filter is None and made else None
        self._loops: list[tuple[Duty, str]] = [(duty, DUTIES) for duty in made if not isinstance(duty, WokenDuty)]
        if timed:
            self._loops.insert(0, (TimerRunner(engine, timed, given), DUTIES))
        if self._leadership is not None and Cascade in duties:
            self._loops.append((TimerRunner(engine, [second], given), CASCADES))
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def leads(self) -> bool:
        """Whether this process runs the duties now."""
        return self._leadership is None or self._leadership.leads[DUTIES].is_set()

    async def __aenter__(self) -> Self:
        self._stopping.clear()
        if self._leadership is not None:
            self._tasks.append(asyncio.create_task(self._leadership.run(self._stopping), name="duty lead"))
        self._tasks += [
            asyncio.create_task(self._run(loop, group), name=f"duty {loop.name}") for loop, group in self._loops
        ]
        self._engine.attach(self)
        return self

    async def _run(self, loop: Duty, group: str) -> None:
        """Run one duty while this process leads its group."""
        if self._leadership is None:
            with self._engine.timer_wakeups() as woken:
                await loop.run(self._stopping, woken if isinstance(loop, TimerRunner) else None)
            return
        leads = self._leadership.leads[group]
        while not self._stopping.is_set():
            waiting = [asyncio.ensure_future(leads.wait()), asyncio.ensure_future(self._stopping.wait())]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waiting:
                    one.cancel()
            if isinstance(loop, TimerRunner):
                with self._engine.timer_wakeups() as woken:
                    await loop.run(self._stopping, woken, while_=leads)
            else:
                await loop.run(self._stopping, while_=leads)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self, grace: timedelta = timedelta(seconds=15)) -> bool:
        """Let every duty finish its round, for `grace` at most; False if one had to be cancelled."""
        self._stopping.set()
        self._engine.detach(self)
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=grace.total_seconds())
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._leadership is not None and any(event.is_set() for event in self._leadership.leads.values()):
            with contextlib.suppress(FlowFabricError, TimeoutError):
                async with asyncio.timeout(1.0):  # otherwise the lease ends by itself
                    await self._engine.leave_lead()
            self._leadership.resign()
        return not late
