"""Waiting without a worker: what a handler waits for, and how its execution is parked once all of it waits.

A task of a handler waits at a gate, a future that opens when a time is due, another execution has ended or a signal has
arrived. When every task of the handler waits at a gate, the execution is parked in the database, or suspended if it
waits for signals alone, and the handler is stopped; its gates stay closed. While another task of it
runs, the gates open here, and parking is considered again now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flowfabric.client.current import background
from flowfabric.contracts.waits import WaitRequest
from flowfabric.errors import ExecutionNotActive, FlowFabricError, Interrupted, InvalidInput, LeaseLost, StateError
from flowfabric.values.execution import Outcome
from flowfabric.values.ids import ExecutionId
from flowfabric.values.wait import AlreadySatisfied
from flowfabric.worker import told
from flowfabric.worker.durable import task_tree
from flowfabric.worker.durable.in_thread import calling_thread

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

log = logging.getLogger("flowfabric.worker")
_FIRST_CHECK = 0.02  # seconds until parking is considered again
_MAX_CHECK = 1.0
_MAX_PAUSE = 5.0
_RETRY = 0.5  # seconds until a call is made again that the database did not take
_WAITS = "waits without a worker"
_MOST = 1000  # executions that one parked execution can wait for
# Turns of the loop for which a handler must not have moved. A result reaches the task that waits for it through
# callbacks, one turn for each future in between.
STEADY = 10


class Gate:
    """Where a task of a handler waits: for a time, for the end of an execution, or for the first of both.

    One that is for neither never opens.
    """

    __slots__ = ("end", "execution_id", "until")

    def __init__(self, until: datetime | None = None, execution_id: ExecutionId | None = None) -> None:
        self.until = until
        self.execution_id = execution_id
        self.end: asyncio.Future[Outcome] | None = None  # while it cannot be parked

    @property
    def can_open(self) -> bool:
        return self.until is not None or self.execution_id is not None


class SignalGate(Gate):
    """Where a task waits for signals: at which waitpoints, until when, and how many signals are known on each."""

    __slots__ = ("deadline", "request", "seen", "use", "waitpoint_ids")

    def __init__(
        self, request: WaitRequest, use: int, waitpoint_ids: Sequence[UUID] = (), deadline: datetime | None = None
    ) -> None:
        # An escalated wait stays open: the handler has nothing to do about it.
        super().__init__(None if request.behavior == "escalate" else deadline)
        self.request = request
        self.use = use
        self.waitpoint_ids = waitpoint_ids
        self.seen: Sequence[int] = [0] * len(waitpoint_ids)
        self.deadline = deadline

    @property
    def ends_execution(self) -> bool:
        """Whether the engine ends the execution at the deadline."""
        return self.request.behavior in ("fail", "cancel", "expire")

    @property
    def can_open(self) -> bool:
        return True


class Parking:
    """The gates at which the tasks of one handler wait."""

    __slots__ = ("_check", "_check_after", "_passed", "_running", "_steady", "_task", "gates")

    def __init__(self, running: Running) -> None:
        self.gates: dict[asyncio.Future[Any], Gate] = {}
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._check: asyncio.Handle | None = None
        self._check_after = _FIRST_CHECK
        self._passed: datetime | None = None
        self._steady = 0

    @property
    def is_under_way(self) -> bool:
        """Whether the execution is being parked: no gate opens meanwhile."""
        return self._task is not None

    def is_due(self, until: datetime) -> bool:
        """Whether a time is due."""
        return until <= self._running.database_now() or (self._passed is not None and until <= self._passed)

    def pass_time(self, until: datetime) -> None:
        """Trust the database: this time has passed, even if our estimate disagrees."""
        self._passed = until if self._passed is None else max(until, self._passed)

    async def wait(self, gate: Gate, *, again: bool = False) -> None:
        """Wait at a gate; may return early. `again`: it did, so there is no reason to consider parking at once.

        A synchronous handler has one place where it can wait: it is unwound there, and its execution parked afterwards.
        """
        self._unwind(gate)
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self.gates[opened] = gate
        until = gate.until
        left = None if until is None else max((until - self._running.database_now()).total_seconds(), 0)
        timer = None if left is None else loop.call_later(left, self._open, opened)
        if again:
            self._check_later()
        else:
            # One check for all tasks that begin to wait in this turn of the loop.
            if self._check is not None:
                self._check.cancel()
            self._check = loop.call_soon(self.consider)
            self._check_after = _FIRST_CHECK
        self._steady = 0
        try:
            await opened
        finally:
            if timer is not None:
                timer.cancel()
            del self.gates[opened]
            if gate.end is not None:
                gate.end.cancel()
                gate.end = None

    async def leave(self, gate: SignalGate) -> None:
        """Leave the execution to the engine, which ends it as the wait says, whatever else the handler does."""
        self._unwind(gate)
        await park(self._running, [gate])

    def _unwind(self, gate: Gate) -> None:
        """Unwind a handler that waits from a thread."""
        if calling_thread.get() is not None:
            self._running.unwound_at = gate
            raise Interrupted(_WAITS)

    def _open(self, opened: asyncio.Future[None]) -> None:
        # While the execution is being parked, gates stay closed; `_park` opens them afterwards.
        if not self.is_under_way and not self._running.is_parked and not opened.done():
            opened.set_result(None)

    def _ended(self, opened: asyncio.Future[None], _: asyncio.Future[Outcome]) -> None:
        self._open(opened)

    def consider(self) -> None:
        """Park, if every task of the handler waits for something that needs no worker."""
        self._check = None
        running = self._running
        if not self.gates or self.is_under_way or running.is_cancelled or running.is_parked:
            return
        if 0 < self._steady < STEADY:
            self._steady += 1
            self._check = asyncio.get_running_loop().call_soon(self.consider)
            return
        if task_tree.all_wait(running.tasks, self.gates):
            if self._steady:
                self._task = background(self._park(), "flowfabric parking")
                self._steady = 0
            else:
                self._steady = 1
                self._check = asyncio.get_running_loop().call_soon(self.consider)
            return
        self._steady = 0
        # Another task of the handler runs, and there is no event for its end.
        if self._check_after > _FIRST_CHECK:
            self._listen()
        self._check_later()

    def _check_later(self) -> None:
        if self._check is None:
            self._check = asyncio.get_running_loop().call_later(self._check_after, self.consider)
            self._check_after = min(self._check_after * 2, _MAX_CHECK)

    def _listen(self) -> None:
        """Receive the ends of executions here, since the database does not wait for them; poll for signals."""
        for opened, gate in list(self.gates.items()):
            if isinstance(gate, SignalGate):
                self._open(opened)
            elif gate.execution_id is not None and gate.end is None:
                gate.end = self._running.worker.client.outcomes.future(gate.execution_id)
                gate.end.add_done_callback(partial(self._ended, opened))

    async def _park(self) -> None:
        running = self._running
        gates = list(self.gates.values())
        ended: set[ExecutionId] = set()
        try:
            because = await park(running, gates)
            if because == "ended":
                ended = set(await running.worker.engine.read_outcomes(_ends_of(gates)))
        except Exception:
            log.exception("execution %s could not be parked", running.claimed.execution_id)
            because = "trouble"
        finally:
            self._task = None
        if because is None:
            return
        # Not parked: open the gates that may open.
        if because == "due" and (first := _first_of(gates)) is not None:
            self.pass_time(first)
        for opened, gate in list(self.gates.items()):
            if (
                gate.execution_id in ended
                or (because == "signal" and isinstance(gate, SignalGate))
                or (gate.until is not None and self.is_due(gate.until))
                or (gate.end is not None and gate.end.done())
            ):
                self._open(opened)
        self._check_later()


async def park(running: Running, gates: Sequence[Gate]) -> str | None:
    """Park or suspend the execution until one of the gates opens, and stop its handler.

    Returns why that is not possible: `ended`, `due` or `signal`; None when it is parked, or the lease is lost.
    """
    return await leave(running, partial(_park_once, running, gates), _WAITS)


async def leave(running: Running, call: Callable[[], Awaitable[str | None]], reason: str) -> str | None:
    """Give the lease back with `call` and stop the handler.

    Returns what `call` returns if that is a reason to keep the lease; None when it is given back, or lost.
    """
    pause = _RETRY
    while not running.is_cancelled:
        try:
            await running.settled()
            because = await call()
        except (LeaseLost, ExecutionNotActive) as error:
            running.worker.handlers.lost(running, error)
            break
        except FlowFabricError as error:
            if not error.retryable:
                raise
            if not running.worker.engine.outage.covers(error):
                told.say(logging.WARNING, running, "cannot give back its worker: %s", error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _MAX_PAUSE)
            continue
        if because is not None:
            return because
        running.is_parked = True
        told.say(logging.DEBUG, running, reason)
        running.worker.handlers.let_go(running)
        running.stop(reason)
        break
    return None


async def _park_once(running: Running, gates: Sequence[Gate]) -> str | None:
    """Suspend on the condition of one wait alone; park for anything else, which suspends on several waits."""
    gates = [gate for gate in gates if gate.can_open]
    if not gates:
        raise InvalidInput("all it waits for was given up", field="wait_for")
    if len(gates) == 1 and isinstance(gates[0], SignalGate):
        return await _suspend(running, gates[0])
    waits = [gate for gate in gates if isinstance(gate, SignalGate)]
    first = _first_deadline(waits)
    reasons = {gate.request.reason for gate in waits}
    parked = await running.worker.engine.park(
        running.handle,
        until=_first_of([gate for gate in gates if not isinstance(gate, SignalGate)]),
        ends_of=_ends_of(gates),
        signals_on={
            waitpoint: seen for gate in waits for waitpoint, seen in zip(gate.waitpoint_ids, gate.seen, strict=True)
        },
        conditions={waitpoint: gate.request.condition for gate in waits for waitpoint in gate.waitpoint_ids},
        timeout_at=None if first is None else first.deadline,
        timeout_behavior="auto_resume_with_timeout_signal" if first is None else first.request.behavior,
        reason_code=reasons.pop() if len(reasons) == 1 else "waiting_for_signal",
    )
    return None if parked.parked else parked.because


async def _suspend(running: Running, gate: SignalGate) -> str | None:
    deadline = gate.deadline
    if deadline is not None:
        if gate.until is not None and not gate.ends_execution and running.parking.is_due(gate.until):
            return "due"
        # `suspend_on` refuses an old deadline; one that is due now takes effect at once.
        deadline = max(deadline, running.database_now())
    try:
        answer = await running.worker.engine.suspend_on(
            running.handle,
            gate.waitpoint_ids,
            gate.request.condition,
            reason_code=gate.request.reason,
            timeout_at=deadline,
            timeout_behavior=gate.request.behavior,
        )
    except StateError as error:
        if error.kind == "already_suspended":  # by a call whose result was lost
            return None
        if error.kind == "waitpoint_not_pending":
            return "signal"
        raise
    return "signal" if isinstance(answer, AlreadySatisfied) else None


def _first_of(gates: Sequence[Gate]) -> datetime | None:
    """The earliest time that one of the gates is for."""
    return min((gate.until for gate in gates if gate.until is not None), default=None)


def _first_deadline(waits: Sequence[SignalGate]) -> SignalGate | None:
    """The wait with the earliest deadline; one that escalates only if no other has a deadline."""
    limited = [(gate.deadline, not gate.ends_execution, gate) for gate in waits if gate.deadline is not None]
    chosen = [one for one in limited if one[2].until is not None] or limited
    return min(chosen, key=lambda one: one[:2])[2] if chosen else None


def _ends_of(gates: Sequence[Gate]) -> list[ExecutionId]:
    """The executions whose ends the gates are for."""
    return sorted({gate.execution_id for gate in gates if gate.execution_id is not None})[:_MOST]
