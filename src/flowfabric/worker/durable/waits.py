"""Waits of a handler: for a time, and for signals.

A wait for signals has three forms: the handler's request (`WaitRequest`), the waitpoints that the engine opened for it
(`OpenWait`), and how it ended (`WaitResult`), which is recorded for later runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flowfabric.contracts.waits import Raise, WaitRequest
from flowfabric.errors import InvalidInput, NoSignal
from flowfabric.values.durations import Duration, duration
from flowfabric.values.signal import Signal
from flowfabric.values.step import NewStep, Step
from flowfabric.values.wait import OpenWait, WaitResult
from flowfabric.worker.durable.memory import describe
from flowfabric.worker.durable.order import in_order
from flowfabric.worker.durable.parking import Gate, SignalGate
from flowfabric.worker.durable.steps import in_step

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

log = logging.getLogger("flowfabric.worker")
HANDLER_ENDED = "the handler has ended"


# Times


async def sleep(running: Running, pause: Duration) -> None:
    """Wait for `pause`, counted from the first run that reached this call."""
    await running.check()
    span = duration(pause, "pause")
    if span < timedelta(0):
        raise InvalidInput(f"got {pause!r}", field="pause", allowed="zero or more")
    if in_step.get():
        await asyncio.sleep(span.total_seconds())
        return
    use, known, until = await _begin_sleep(running, span, "sleep")
    has_ended = not span or (known is not None and known.place is not None)
    while not has_ended and not running.parking.is_due(until):
        await running.parking.wait(Gate(until))
    await running.ended("sleep", use, "sleep", known)


async def wake_time(running: Running, span: timedelta, name: str) -> datetime:
    """Return the end of a duration that began in the first run."""
    _, _, until = await _begin_sleep(running, span, name)
    return until


@in_order
async def _begin_sleep(running: Running, span: timedelta, name: str) -> tuple[int, Step | None, datetime]:
    _, _, use, known = await running.ask(name, "sleep")
    if known is not None:
        until = known.at
    else:
        until = await running.record(NewStep(name=name, n=use, kind="sleep", pause=span))
    assert until is not None
    return use, known, until


# Signals


@in_order
async def waitpoint(running: Running, request: WaitRequest) -> OpenWait:
    """Open the waitpoints of a wait, with their tokens; the handler waits later."""
    use, known = await _next_wait(running, request)
    return await _open(running, request, use, is_new=known is None)


async def wait_for(running: Running, request: WaitRequest, opened: OpenWait | None = None) -> Any:
    """Wait for signals and return them to the handler. `opened` is the result of `waitpoint`."""
    await running.check()
    if opened is None:
        use, known, opened_now = await _begin_wait(running, request)
    else:
        opened_now = None
        use = opened.use
        known = (await running.memory()).known(request.name, "wait", use)
    try:
        outcome, signals = await _outcome(running, request, use, known, opened, opened_now)
        if outcome != "given_up":
            await running.ended(request.name, use, "wait", known)
    except asyncio.CancelledError as error:
        # A wait that the handler cancels has ended, in every later run too, even if signals arrive meanwhile.
        if not running.is_cancelled and not running.is_parked and error.args != (HANDLER_ENDED,):
            running.tasks.has_cancelled = True
            # A run that has not asked for all that was recorded may be of changed code: it ends no wait for good.
            if known is None or not (await running.memory()).missing:
                await _settle(running, SignalGate(request, use), give_up=True)
        raise
    while outcome == "given_up":
        await running.parking.wait(Gate())  # an earlier run cancelled it for another branch: nothing ends it
        await running.check()
    if opened is not None:
        unanswered = (await running.memory()).unanswered
        if (request.name, use) in unanswered:
            raise InvalidInput("it has already timed out", field="wait", allowed="a new waitpoint")
        if outcome != "resumed":
            unanswered.add((request.name, use))
    if outcome == "resumed":
        return signals[-1] if request.is_single else signals
    if not isinstance(request.default, Raise):
        return request.default
    kind = "wait_timed_out" if outcome == "timed_out" else "wait_overridden"
    raise NoSignal(kind, request.name, execution_id=running.claimed.execution_id)


async def _outcome(
    running: Running,
    request: WaitRequest,
    use: int,
    known: Step | None,
    opened: OpenWait | None,
    opened_now: OpenWait | None,
) -> tuple[str, list[Signal[Any]]]:
    """Return how a wait ended, in this run or in an earlier one, and its signals.

    Signals that do not fit the requested type are set aside, and the wait continues.
    """
    gate: SignalGate | None = None
    result: WaitResult | None = None
    if known is not None and known.outcome is not None:
        result = WaitResult(outcome=known.outcome, result=known.result, seen=())
    is_first = True
    while True:
        if result is not None and result.outcome == "resumed":
            codecs, execution_id = running.worker.codecs, running.claimed.execution_id
            signals, misfits = request.signals(result.result, codecs, execution_id)
            if not misfits:
                return "resumed", signals
            await _refuse(running, request, use, known, misfits)
        elif result is not None and result.outcome != "open":
            return result.outcome, []
        elif gate is not None:
            if gate.ends_execution and gate.deadline is not None and running.parking.is_due(gate.deadline):
                await running.parking.leave(gate)
            else:
                await running.parking.wait(gate, again=not is_first)
            await running.check()
            is_first = False
        if gate is None:
            gate = await _gate(running, request, use, known, opened, opened_now)
            if known is None and opened is None and result is None:
                continue  # no signal can have arrived at waitpoints that were opened just now
        result = await _settle(running, gate)


async def _gate(
    running: Running,
    request: WaitRequest,
    use: int,
    known: Step | None,
    opened: OpenWait | None,
    opened_now: OpenWait | None,
) -> SignalGate:
    """Return where the handler waits: the waitpoints of a wait, opened if they are not, and its deadline."""
    ids: Sequence[UUID]
    deadline: datetime | None = None
    if opened is not None:
        ids = [one.waitpoint_id for one in opened.waitpoints]
        if request.timeout is not None:
            deadline = await wake_time(running, request.timeout, f"timeout of wait {request.name} {use}")
    elif known is not None:
        ids, deadline = known.waitpoint_ids, known.at
    else:
        assert opened_now is not None
        ids, deadline = [one.waitpoint_id for one in opened_now.waitpoints], opened_now.deadline
    return SignalGate(request, use, ids, deadline)


async def _refuse(
    running: Running, request: WaitRequest, use: int, known: Step | None, misfits: Mapping[UUID, str]
) -> None:
    """Set signals aside that do not fit; their senders may answer again."""
    execution_id = running.claimed.execution_id
    if known is not None and known.outcome is not None and not known.is_unread:
        # An earlier run read it and continued: asking again would not undo what followed.
        problem = next(iter(misfits.values()))
        await running.changed(f"the recorded answer of {describe('wait', request.name, use)} does not fit: {problem}")
    with running.leased(), running.calling():
        await running.worker.engine.refuse_signals(running.handle, request.name, use, misfits)
    for signal_id, why in misfits.items():
        log.warning(
            "execution %s: signal %s at wait %r is set aside: it %s", execution_id, signal_id, request.name, why
        )


@in_order
async def _begin_wait(running: Running, request: WaitRequest) -> tuple[int, Step | None, OpenWait | None]:
    use, known = await _next_wait(running, request)
    return use, known, None if known is not None else await _open(running, request, use, is_new=True)


async def _next_wait(running: Running, request: WaitRequest) -> tuple[int, Step | None]:
    """Return the number of this use of the wait's name, and its recorded step."""
    await running.check()
    if in_step.get():
        raise InvalidInput("inside a step", field="wait_for", allowed="in the handler itself")
    _, _, use, known = await running.ask(request.name, "wait")
    if known is not None and len(known.waitpoint_ids) != len(request.keys):
        await running.changed(
            f"recorded: {describe('wait', request.name, use)} at {len(known.waitpoint_ids)} waitpoints;"
            f" asked for instead: at {len(request.keys)}"
        )
    return use, known


async def _open(running: Running, request: WaitRequest, use: int, *, is_new: bool) -> OpenWait:
    """Return the waitpoints of a wait: new ones, or those of an earlier run."""
    if is_new:
        await running.mark_read()
    with running.leased(), running.calling():
        opened = await running.worker.engine.open_wait(
            running.handle, request.name, use, request.keys, request.timeout, request.payload_schema
        )
    if is_new and running.worker.step_hook is not None:
        await running.worker.step_hook.after(running, request.name, use)
    return opened


async def _settle(running: Running, gate: SignalGate, *, give_up: bool = False) -> WaitResult:
    """Ask the engine whether a wait has ended; `give_up` ends it if not."""
    request = gate.request
    if give_up:
        await running.mark_read()
    try:
        with running.leased(), running.calling():
            result = await running.worker.engine.settle_wait(
                running.handle,
                request.name,
                gate.use,
                request.condition,
                reason_code=request.reason,
                deadline=None if gate.ends_execution else gate.until,
                give_up=give_up,
                payload_schema=request.payload_schema,
            )
    except InvalidInput as error:
        log.debug("execution %s: %s", running.claimed.execution_id, error)
        await running.changed(
            f"recorded: {describe('wait', request.name, gate.use)} at other waitpoints;"
            f" asked for instead: at {', '.join(request.keys)}"
        )
    gate.seen = result.seen
    return result
