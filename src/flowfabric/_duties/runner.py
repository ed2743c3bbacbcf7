"""Runs the duties of one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

from flowfabric._duties.all import ALL
from flowfabric._duties.duty import Duty
from flowfabric._duties.timer import WokenDuty
from flowfabric.engine import Engine
from flowfabric.values.page import ScannerFilter


class TimerRunner(Duty):
    """Runs the woken duties of one process in one loop, which sleeps until the first timer is due."""

    interval = timedelta(milliseconds=750)

    def __init__(self, engine: Engine, duties: Sequence[WokenDuty]) -> None:
        super().__init__(engine)
        self._duties = duties

    async def run_once(self) -> int:
        """Run bounded rounds of each kind in turn until none has more: the backlog of one delays no other."""
        handled = 0
        failure: Exception | None = None
        waiting = list(self._duties)
        while waiting and not self.stopping.is_set():
            turn, waiting = waiting, []
            for duty in turn:
                try:
                    done = await duty.round()
                except Exception as error:  # raised below, after the others have run
                    failure = failure or error
                    continue
                handled += done.handled
                if done.more:
                    waiting.append(duty)
        if failure is not None:
            raise failure
        return handled

    async def until_next(self) -> float:
        return await self.engine.sleep_until_due(self.interval)


class Duties:
    """All duties of a process: `async with Duties(engine): ...`. Any number of processes may run them."""

    def __init__(
        self,
        engine: Engine,
        duties: Sequence[type[Duty]] = ALL,
        *,
        filter: ScannerFilter | None = None,  # noqa: A002
    ) -> None:
        made = [duty(engine, filter=filter) for duty in duties]
        timed = [duty for duty in made if isinstance(duty, WokenDuty)]
        self._engine = engine
        self._loops: list[Duty] = [duty for duty in made if not isinstance(duty, WokenDuty)]
        if timed:
            self._loops.insert(0, TimerRunner(engine, timed))
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        self._stopping.clear()
        woken = self._stack.enter_context(self._engine.timer_wakeups())
        self._tasks = [
            asyncio.create_task(
                loop.run(self._stopping, woken if isinstance(loop, TimerRunner) else None),
                name=f"duty {loop.name}",
            )
            for loop in self._loops
        ]
        self._engine.attach(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self, grace: timedelta = timedelta(seconds=15)) -> bool:
        """Let every duty finish its round, for `grace` at most; False if one had to be cancelled."""
        self._stopping.set()
        self._engine.detach(self)
        self._stack.close()
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=grace.total_seconds())
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        return not late
