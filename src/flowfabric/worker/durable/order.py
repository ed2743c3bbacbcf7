"""The branches of a handler get what they wait for one after the other, in the same order in every run.

Which use of a name is whose depends on the order in which branches continue. Two kinds of results are passed on:

* a *call* that takes as long as the database does: a submission, a time, a sleep or a wait that is opened, usage,
  output. Calls are passed on in the order in which they were made, and before anything else;
* an *end*, which may come at any time: of a step, of an execution, of a sleep, of a wait. Ends have a number in the
  record, their place. They are passed on by their numbers, and a new one after all that are recorded.

After each the next one waits until nothing in the handler moves any more, for at most the turns of the loop that
parking takes. A handler that does one thing at a time never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar, cast

from flowfabric.client.current import in_step
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.in_thread import calling_thread
from flowfabric.worker.durable.parking import STEADY

if TYPE_CHECKING:
    from flowfabric.values.step import Step
    from flowfabric.worker.durable.memory import Memory
    from flowfabric.worker.durable.running import Running

_CALL = 0.001  # seconds until branches that are in a call are checked again
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


class Turn:
    """What a branch waits for. `place` is the number of an end; None of a call."""

    __slots__ = ("_order", "is_held", "is_over", "key", "opened", "place")

    def __init__(self, order: Order, key: tuple[bool, int], place: int | None) -> None:
        self._order = order
        self.key = key
        self.place = place
        self.is_held = False  # by the check for changed code
        self.is_over = False
        self.opened: asyncio.Future[None] | None = None  # once it has its result

    def __lt__(self, other: Turn) -> bool:
        return self.key < other.key

    async def come(self) -> None:
        """Wait for the turn. The result is here."""
        await self._order._come(self)

    def leave(self) -> None:
        """The branch does not wait any more."""
        self._order._leave(self)


# The call that a branch is in. The work of middleware there is part of it, even in a task of its own.
_call: ContextVar[Turn | None] = ContextVar("flowfabric_call", default=None)


class Order:
    """The turns of the branches of one handler."""

    __slots__ = ("_calls", "_is_settled", "_is_watching", "_loop", "_queue", "_running", "_turns")

    def __init__(self, running: Running) -> None:
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._queue: list[Turn] = []
        self._calls = 0
        self._is_settled = False  # whether nothing has moved since the last turn
        self._is_watching = False
        self._turns = 0

    @property
    def is_held(self) -> bool:
        """Whether a branch waits for its turn."""
        return any(turn.opened is not None for turn in self._queue)

    @property
    def waiting(self) -> set[asyncio.Future[None]]:
        """What the branches wait for that have their result."""
        return {turn.opened for turn in self._queue if turn.opened is not None}

    def moved(self) -> None:
        """A branch continues."""
        self._is_settled = False
        self._turns = 0

    def call(self) -> Turn:
        """A call is made."""
        self._calls += 1
        return self._queued(Turn(self, (False, self._calls), None))

    def end(self, place: int) -> Turn:
        """An end with this number is recorded."""
        return self._queued(Turn(self, (True, place), place))

    def _queued(self, turn: Turn) -> Turn:
        heappush(self._queue, turn)
        self._watch()
        return turn

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """While the check for changed code holds a branch, its call lets others pass."""
        turn = _outer_call()
        if turn is None:
            yield
            return
        turn.is_held = True
        self._watch()
        try:
            yield
        finally:
            turn.is_held = False

    def _leave(self, turn: Turn) -> None:
        if self._remove(turn):
            self._watch()

    def _remove(self, turn: Turn) -> bool:
        turn.is_over = True
        if not self._queue:
            return False
        if self._queue[0] is turn:
            heappop(self._queue)
            return True
        if turn not in self._queue:
            return False
        self._queue.remove(turn)
        heapify(self._queue)
        return True

    async def _come(self, turn: Turn) -> None:
        turn.opened = self._loop.create_future()
        self._turns = 0
        self._watch()
        try:
            await turn.opened
        except BaseException:
            self._leave(turn)
            raise

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._turns = 0
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_watching = False
        self._turns += 1
        if not self._is_settled:
            # Another handler's callbacks count too: then it takes all the turns.
            if self._turns < STEADY and not task_tree.is_idle(self._loop):
                self._look_again()
                return
            self._is_settled = True
        if self._queue:
            self._next()

    def _look_again(self) -> None:
        self._is_watching = True
        self._loop.call_soon(self._look)

    def _next(self) -> None:
        """Pass on the next one, if its result is here and nothing recorded before it is missing."""
        turn = self._queue[0]
        memory = self._running.loaded_memory
        first = None if memory is None else memory.first_unasked
        is_late = turn.place is not None and first is not None and first < turn.place
        if turn.opened is None and not turn.is_held:
            return
        if turn.is_held or is_late:
            # Not the code that recorded this, or it waits for something else.
            if self._running.tasks.calling and not turn.is_held:
                self._is_watching = True
                self._turns = 0
                self._loop.call_later(_CALL, self._look)
                return
            if self._turns < STEADY:
                self._look_again()
                return
            ready = [one for one in self._queue if one.opened is not None]
            if not ready:
                return
            turn = min(ready)
        self._remove(turn)
        if memory is not None and turn.place is not None:
            memory.passed(turn.place)
        self.moved()
        assert turn.opened is not None
        if not turn.opened.done():
            turn.opened.set_result(None)
        self._watch()


def _outer_call() -> Turn | None:
    turn = _call.get()
    return None if turn is None or turn.is_over else turn


def order_of(running: Running) -> Order | None:
    """The order of a handler with more than one branch; None where branches cannot be told apart or there is one.

    None too for what is part of a call, which waits for its turn as a whole.
    """
    if calling_thread.get() is not None or in_step.get() or _outer_call() is not None:
        return None
    if len(running.tasks) > 1 or (running.has_order and running.order.is_held):
        return running.order
    if running.has_order:
        running.order.moved()
    return None


def got(memory: Memory, place: int) -> None:
    """A branch gets an end without a turn. Inside a call others may still get earlier ones."""
    if _outer_call() is None:
        memory.passed(place)


async def come(running: Running, known: Step) -> None:
    """Wait for the turn of an end that is recorded."""
    memory, place = running.loaded_memory or await running.memory(), known.place
    order = order_of(running)
    if place is None:
        turn = None if order is None else order.call()
    else:
        memory.asked(place)
        turn = None if order is None else order.end(place)
    if turn is not None:
        await turn.come()
        await running.check()
    elif place is not None:
        got(memory, place)


async def end(running: Running) -> int:
    """Wait for the turn of a new end, and return its place."""
    memory = running.loaded_memory or await running.memory()
    place = memory.draw()
    if (order := order_of(running)) is None:
        got(memory, place)
    else:
        await order.end(place).come()
        await running.check()
    return place


def in_order(method: Method) -> Method:
    """A call to the database that a handler waits for: branches continue in the order of their calls."""

    @functools.wraps(method)
    async def operate(running: Running, *args: Any, **kwargs: Any) -> Any:
        order = order_of(running)
        if order is None:
            return await method(running, *args, **kwargs)
        turn = order.call()
        token = _call.set(turn)
        try:
            await running.memory()  # branches that wait for it ask before this one continues
            value = await method(running, *args, **kwargs)
        except Exception:
            await turn.come()
            raise
        except BaseException:
            turn.leave()
            raise
        finally:
            _call.reset(token)
        await turn.come()
        return value

    return cast("Method", operate)
