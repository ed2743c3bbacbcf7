"""Changed code: a run that asks for something new while recorded things are missing stops before it happens.

A request that is not recorded, while the run has not asked for everything that earlier runs recorded, is held until
every other branch of the handler waits, has ended or is held too, for at most the turns of the loop that parking takes;
turns in which a branch is in a call of ours to the database do not count. If something is still missing then, the
handler was changed: the execution goes back to the queue and waits for code that fits. A branch that the worker cannot
judge ends the hold, and the run continues; `steps_changed` at the end of the handler is the last check.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowfabric.client.current import background
from flowfabric.errors import Interrupted, StepsChanged
from flowfabric.values.step import StepKind
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.in_thread import CallingThread, calling_thread
from flowfabric.worker.durable.memory import Memory, Request, describe
from flowfabric.worker.durable.parking import STEADY, Gate, leave

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

_MOST_NAMED = 10
_CALL = 0.001  # seconds until a branch that is in a call is checked again
_PATIENCE = 5.0  # seconds that a question waits for branches that cannot be judged
# Requests that are compared with the record: those that do something or wait for something new.
_COMPARED: frozenset[StepKind] = frozenset(("step", "submit", "wait", "sleep"))


class Changes:
    """The requests of one handler that are held."""

    __slots__ = ("_held", "_is_looking", "_missing", "_patience", "_running", "_turns", "found")

    def __init__(self, running: Running) -> None:
        self.found: StepsChanged | None = None
        self._running = running
        self._held: dict[asyncio.Future[bool], Request | None] = {}
        self._turns = 0
        self._missing = 0
        self._patience = _PATIENCE
        self._is_looking = False

    async def hold(self, request: Request | None) -> bool:
        """Wait until nothing is missing (True) or that cannot be decided (False). A changed handler never returns.

        `request` is None for a question that changes nothing: it gets False where a request would stop the run.
        """
        running = self._running
        memory = await running.memory()
        if running.tasks.is_unclear:
            return False
        if isinstance(calling_thread.get(), CallingThread):
            # A synchronous handler has one branch, outside of `ctx.map`.
            if request is not None and memory.missing:
                await self.stop(differs(memory, [request]))
            return not memory.missing
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[bool] = loop.create_future()
        self._held[opened] = request
        self._turns = 0
        if not self._is_looking:
            self._look_later(memory)
        try:
            with running.order.holding():
                return await opened
        finally:
            self._held.pop(opened, None)

    def _look_later(self, memory: Memory, pause: float = 0) -> None:
        self._is_looking = True
        loop = asyncio.get_running_loop()
        if pause:
            loop.call_later(pause, self._look, memory)
        else:
            loop.call_soon(self._look, memory)

    def _look(self, memory: Memory) -> None:
        running = self._running
        self._is_looking = False
        if not self._held or running.is_cancelled or running.is_parked:
            return
        if not memory.missing:
            self._open(True)
            return
        if len(memory.missing) != self._missing:
            self._missing, self._turns = len(memory.missing), 0
        self._turns = 0 if running.order.is_held else self._turns + 1
        if self._turns < STEADY:
            self._look_later(memory)
            return
        if running.tasks.calling:
            self._turns = 0
            self._look_later(memory, _CALL)
            return
        futures = {*self._held, *running.parking.gates}
        questions = [opened for opened, request in self._held.items() if request is None]
        # While the thread of a synchronous handler waits for `ctx.map`, its own task waits with it.
        tasks = running.tasks - {running.asyncio_task} if running.is_in_map else running.tasks
        if task_tree.all_wait(tasks, futures, with_timeouts=True):
            if questions:
                self._turns = 0
                self._answer(questions, False)
                self._look_later(memory)
            else:
                asked = [request for request in self._held.values() if request is not None]
                background(self._stop(differs(memory, asked)), "flowfabric changed code")
        elif questions and self._patience > 0:
            # A branch that cannot be judged may still ask for what is missing. The decision is final, so it waits.
            self._answer([opened for opened in self._held if opened not in questions], False)
            pause = max(_CALL, (_PATIENCE - self._patience) / 2)
            self._patience -= pause
            self._turns = 0
            self._look_later(memory, pause)
        else:
            self._open(False)

    def _open(self, verdict: bool) -> None:
        self._answer(list(self._held), verdict)

    def _answer(self, held: list[asyncio.Future[bool]], verdict: bool) -> None:
        for opened in held:
            if not opened.done():
                opened.set_result(verdict)

    async def _stop(self, problem: str) -> None:
        try:
            await self.stop(problem)
        except Exception as error:  # the execution could not be given back: it fails instead
            for opened in list(self._held):
                if not opened.done():
                    opened.set_exception(error)

    async def stop(self, problem: str) -> None:
        """Give the execution back until there is code that fits, and stop its handler without another effect."""
        running = self._running
        self.found = StepsChanged(problem, execution_id=running.claimed.execution_id)
        if calling_thread.get() is not None:
            running.unwound_at = Gate()
            raise Interrupted("its code changed")
        await give_back(running, problem)


async def give_back(running: Running, problem: str) -> str | None:
    """Make the execution wait for code that fits."""

    async def call() -> str | None:
        await running.worker.engine.stop_changed(running.handle, detail=problem, digest=running.task.code_digest)
        return None

    running.worker.code_changed(running, problem)
    return await leave(running, call, "its code changed")


def differs(memory: Memory, asked: list[Request]) -> str:
    """What the record has and the code did not ask for, and the reverse."""
    missing = f"recorded and not asked for: {_listed([describe(*key) for key in memory.missing])}"
    return f"{missing}; asked for instead: {_listed([str(one) for one in asked])}" if asked else missing


def _listed(words: list[str]) -> str:
    more = len(words) - _MOST_NAMED
    return ", ".join(words[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def is_compared(request: Request, memory: Memory) -> bool:
    """Whether a request is one that a changed handler must not make."""
    return request.kind in _COMPARED and memory.is_new(request)
