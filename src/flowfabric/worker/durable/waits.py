"""Waits of a handler: for a time, and for signals."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from flowfabric.errors import (
    ExecutionNotActive,
    InvalidInput,
    LeaseLost,
    NoSignal,
    StepsChanged,
)
from flowfabric.models import NewStep, OpenWait, Step
from flowfabric.policies import Duration, duration
from flowfabric.signals import Raise, WaitRequest
from flowfabric.worker.durable.parking import SignalWait, Wait
from flowfabric.worker.durable.steps import in_step

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

HANDLER_ENDED = "the handler has ended"


class Opened:
    """The waitpoints that a handler asked for, before it waits at them."""

    __slots__ = ("is_over", "known", "n", "opened", "request")

    def __init__(self, request: WaitRequest, n: int, known: Step | None, opened: OpenWait) -> None:
        self.is_over = False  # it was waited at, and no signal came
        self.request = request
        self.n = n
        self.known = known
        self.opened = opened


async def sleep(running: Running, pause: Duration) -> None:
    await running.check()
    span = _pause(pause)
    if in_step.get():
        await asyncio.sleep(span.total_seconds())
        return
    until = await wake_time(running, span)
    if span:
        while not running.parking.is_over(until):
            await running.parking.wait(Wait(until))


async def wake_time(running: Running, span: timedelta, name: str = "sleep") -> datetime:
    n, known = (await running.memory()).next(name, "sleep")
    if known is not None:
        until = known.at
    else:
        until = await running.record(NewStep(name=name, n=n, kind="sleep", pause=span))
    assert until is not None
    return until


async def waitpoint(running: Running, request: WaitRequest) -> Opened:
    """The waitpoints of a wait, with their tokens; the wait comes later."""
    n, known = await _next_wait(running, request)
    opened = await _open_wait(running, request, n, known)
    return Opened(request, n, known, opened)


async def wait_for(running: Running, request: WaitRequest, opened: Opened | None = None) -> Any:
    """The signals that a wait is for, as the handler is given them."""
    await running.check()
    if opened is None:
        n, known = await _next_wait(running, request)
    else:
        n, known = opened.n, opened.known
    try:
        outcome, result = await _end_of_wait(running, request, n, known, opened)
    except asyncio.CancelledError as error:
        # A wait that the handler cancels is over, and so it is in every later run, whatever arrives meanwhile.
        if not running.is_cancelled and not running.is_parked and error.args != (HANDLER_ENDED,):
            await _settle(running, SignalWait(request, n, (), None, ()), give_up=True)
        raise
    while outcome == "given_up":
        await running.parking.wait(Wait(None))  # nothing ends it: it was given up in favour of something else
        await running.check()
    return _outcome_of_wait(running, request, outcome, result, opened)


async def _end_of_wait(
    running: Running, request: WaitRequest, n: int, known: Step | None, opened: Opened | None
) -> tuple[str, bytes | None]:
    state = await _settled(running, request, n, known, opened)
    again = False
    while isinstance(state, SignalWait):
        if _is_out_of_time(running, state):
            await running.parking.leave(Wait(None, None, state))
        else:
            await running.parking.wait(Wait(state.until, None, state), again=again)
        await running.check()
        state = await _settle(running, state)
        again = True
    return state


def _is_out_of_time(running: Running, wait: SignalWait) -> bool:
    """Whether the execution is to be left to the engine, which ends it as the wait says, whatever else goes on."""
    return wait.ends_execution and wait.deadline is not None and running.parking.is_over(wait.deadline)


async def _next_wait(running: Running, request: WaitRequest) -> tuple[int, Step | None]:
    await running.check()
    if in_step.get():
        raise InvalidInput("inside a step", field="wait_for", allowed="in the handler itself")
    n, known = (await running.memory()).next(request.name, "wait")
    if known is not None and len(known.waitpoint_ids) != len(request.keys):
        raise StepsChanged(
            f"an earlier run waited for {request.name!r} at {len(known.waitpoint_ids)} waitpoints,"
            f" this one at {len(request.keys)}",
            execution_id=running.claimed.execution_id,
        )
    return n, known


async def _open_wait(running: Running, request: WaitRequest, n: int, known: Step | None) -> OpenWait:
    try:
        opened = await running.worker.engine.open_wait(running.handle, request.name, n, request.keys, request.timeout)
    except (LeaseLost, ExecutionNotActive) as error:
        running.worker.lost(running, error)
        raise
    if known is None and running.worker.step_hook is not None:
        await running.worker.step_hook(running, request.name, n)
    return opened


async def _settled(
    running: Running, request: WaitRequest, n: int, known: Step | None, opened: Opened | None
) -> SignalWait | tuple[str, bytes | None]:
    """What came of a wait, or the wait, if it has to go on."""
    if known is not None and known.encoding is not None:
        return known.encoding, known.result
    if known is None and opened is None:
        made = await _open_wait(running, request, n, known)
        ids = [one.waitpoint_id for one in made.waitpoints]
        return SignalWait(request, n, ids, made.deadline, [0] * len(ids))
    if opened is not None:
        ids = [one.waitpoint_id for one in opened.opened.waitpoints]
        deadline = None
        if request.timeout is not None:
            deadline = await wake_time(running, request.timeout, f"timeout of wait {request.name} {n}")
    else:
        assert known is not None
        ids, deadline = list(known.waitpoint_ids), known.at
    return await _settle(running, SignalWait(request, n, ids, deadline, [0] * len(ids)))


async def _settle(
    running: Running, wait: SignalWait, *, give_up: bool = False
) -> SignalWait | tuple[str, bytes | None]:
    request = wait.request
    try:
        state = await running.worker.engine.settle_wait(
            running.handle,
            request.name,
            wait.n,
            request.condition,
            reason_code=request.reason,
            deadline=None if wait.ends_execution else wait.until,
            give_up=give_up,
        )
    except (LeaseLost, ExecutionNotActive) as error:
        running.worker.lost(running, error)
        raise
    except InvalidInput as error:
        raise StepsChanged(
            f"an earlier run waited for {request.name!r} at other waitpoints than {', '.join(request.keys)}",
            execution_id=running.claimed.execution_id,
        ) from error
    if state.outcome != "open":
        return state.outcome, state.result
    wait.seen = state.seen
    return wait


def _outcome_of_wait(
    running: Running, request: WaitRequest, outcome: str, result: bytes | None, opened: Opened | None = None
) -> Any:
    if opened is not None:
        if opened.is_over:
            raise InvalidInput("its time was over before", field="wait", allowed="a new waitpoint")
        opened.is_over = outcome != "resumed"
    if outcome == "resumed":
        signals = request.signals(result, running.worker.codecs)
        return signals[-1] if request.is_single else signals
    if not isinstance(request.default, Raise):
        return request.default
    kind = "wait_timed_out" if outcome == "timed_out" else "wait_overridden"
    raise NoSignal(kind, request.name, execution_id=running.claimed.execution_id)


def _pause(pause: Duration) -> timedelta:
    span = duration(pause, "pause")
    if span < timedelta(0):
        raise InvalidInput(f"got {pause!r}", field="pause", allowed="no time or more")
    return span
