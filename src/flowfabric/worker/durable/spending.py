"""The amounts that a handler uses: reports, and amounts that it holds before it uses them.

Outside of a step they are recorded under a name and the number of its use, in the transaction that counts them, so that
a handler that is run again finds them and counts nothing twice. Inside a step they count every time the step runs.
Calls of concurrent handlers share round trips.

A call that does not fit under a hard limit changes nothing, and the task decides: the execution is given back until
every budget has room for it and then runs again from the top (`pause`), `BudgetExceeded` is raised, or the execution
fails. Steps that other branches of the handler run end before the pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from flowfabric.app.context import Context
from flowfabric.client.limits import look_up
from flowfabric.errors import (
    BudgetExceeded,
    ExecutionNotActive,
    FlowFabricError,
    Interrupted,
    InvalidInput,
    LeaseLost,
)
from flowfabric.middleware import overriding
from flowfabric.values.budget import (
    AlreadyApplied,
    CancelReservation,
    HardBreach,
    OnLost,
    Place,
    Report,
    Reserve,
    Reserved,
    Settle,
    SoftBreach,
    Usage,
    UsageAnswer,
    UsageCall,
    UsageOk,
)
from flowfabric.values.ids import BudgetId, ReservationId, mint_uuid
from flowfabric.values.options import Options
from flowfabric.values.spending import Used, check_names
from flowfabric.values.step import NewStep, Step
from flowfabric.worker import told
from flowfabric.worker.durable.in_thread import calling_thread
from flowfabric.worker.durable.memory import check_name, encode_error, remembered_error
from flowfabric.worker.durable.order import in_order
from flowfabric.worker.durable.parking import STEADY, Gate, leave
from flowfabric.worker.durable.steps import in_step

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running

log = logging.getLogger("flowfabric.worker")
_WAITS = "waits for its budget"
_LONGEST_REST = 600.0  # seconds
_FIRST_REST, _MOST_REST = 0.001, 0.1  # between two checks of the other branches


class Needs:
    """What a paused execution waits for: amounts, and the budgets that have to cover them (None: all of its own)."""

    __slots__ = ("amounts", "budgets")

    def __init__(self, amounts: Mapping[str, int], budgets: tuple[BudgetId, ...] | None) -> None:
        self.amounts = amounts
        self.budgets = budgets


@in_order
async def report_usage(
    running: Running, amounts: Mapping[str, int], budgets: Collection[str] | None, name: str
) -> Used:
    """Count what was used; once for each use of the name, even if the handler is re-run."""
    await running.check()
    ids = await _ids(running, budgets)
    place, known = await _place(running, name)
    if known is not None:
        return Used(remaining=_remaining(known), is_recorded=True)
    # Without a place a call whose result was lost is known by its key.
    usage = Usage(custom=amounts, dedup_key=mint_uuid().hex if place is None else None)
    call = Report(authority=running.handle, usage=usage, budgets=ids, place=place)
    answer = await _fitting(running, call, place, Needs(amounts, ids))
    return _used(running, answer)


@in_order
async def reserve_usage(
    running: Running, amounts: Mapping[str, int], budgets: Collection[str] | None, name: str, on_lost: OnLost
) -> Reserved:
    """Hold amounts, or find those that an earlier run of the handler held or settled here."""
    await running.check()
    if on_lost not in ("charge", "release"):
        raise InvalidInput(f"got {on_lost!r}", field="on_lost", allowed="charge, release")
    ids = await _ids(running, budgets)
    place, known = await _place(running, name)
    if known is not None:
        own = ReservationId(mint_uuid())  # nothing asks for it any more
        return Reserved(reservation_id=own, state="settled", amounts=dict(amounts), remaining=_remaining(known))
    call = Reserve(authority=running.handle, usage=Usage(custom=amounts), budgets=ids, on_lost=on_lost, place=place)
    answer = await _fitting(running, call, place, Needs(amounts, ids))
    assert isinstance(answer, Reserved)
    return answer


@in_order
async def settle_usage(running: Running, reservation_id: ReservationId, amounts: Mapping[str, int]) -> Used:
    """Count the real amounts in place of those held. The excess is counted as overrun, and stops nothing."""
    usage = Usage(custom=amounts)
    answer = await _call(running, Settle(authority=running.handle, reservation_id=reservation_id, usage=usage), None)
    if isinstance(answer, HardBreach):
        name = await _budget_name(running, answer.budget_id)
        told.say(
            logging.WARNING,
            running,
            "used %s %s more than budget %s allows; the next call that needs it does not fit",
            f"{answer.overrun:,}",
            answer.dimension,
            name,
        )
        return Used(remaining={answer.dimension: 0}, overrun=answer.overrun)
    return _used(running, answer)


@in_order
async def cancel_reservation(running: Running, reservation_id: ReservationId) -> None:
    """Give back what is held."""
    if not running.is_cancelled:
        await _call(running, CancelReservation(authority=running.handle, reservation_id=reservation_id), None)


async def _ids(running: Running, budgets: Collection[str] | None) -> tuple[BudgetId, ...] | None:
    if budgets is None:
        return None
    names = running.worker.app.limit_names
    options = Options(budgets=check_names(budgets, "budgets"))
    unknown = names.unknown(options)
    if any(unknown):
        with running.calling():
            await look_up(running.worker.engine, [(names, unknown)])
    return names.limits(options).budget_ids


async def _place(running: Running, name: str) -> tuple[Place | None, Step | None]:
    """Return where a handler is, a name and the number of its use, and its record. None inside a step."""
    check_name(name)
    if in_step.get():
        return None, None
    _, name, use, known = await running.ask(name, "usage")
    breach = _breach_of((name, use))
    if known is None and (await running.memory()).known(breach, "result", 0) is not None:
        # An earlier run took the branch that follows from it.
        refused = (await running.ask(breach, "result")).known
        if refused is not None and refused.error is not None:
            raise remembered_error(refused, refused.result)
    return (name, use), known


def _breach_of(place: Place) -> str:
    """The name of the record that a call did not fit."""
    return f"breach of {place[0]} {place[1]}"


def _remaining(known: Step) -> dict[str, int]:
    """What was left when it was counted."""
    found: dict[str, int] = msgspec.json.decode(known.result or b"{}")
    return found


async def _fitting(running: Running, call: UsageCall, place: Place | None, needs: Needs) -> UsageAnswer:
    """Make a call; if it does not fit, do what the task says."""
    while isinstance(answer := await _call(running, call, place), HardBreach):
        await _breached(running, answer, needs, place)
    return answer


async def _call(running: Running, call: UsageCall, place: Place | None) -> UsageAnswer:
    if place is not None:
        await running.mark_read()
    hook = running.worker.step_hook if place is not None else None
    if hook is not None and place is not None:
        await hook.before(running, *place)
    with running.calling():
        answer = await running.worker.reports.use(call)
    if isinstance(answer, FlowFabricError):
        if isinstance(answer, LeaseLost | ExecutionNotActive):
            running.worker.handlers.lost(running, answer)
        raise answer
    if hook is not None and place is not None:
        await hook.after(running, *place)
    return answer


def _used(running: Running, answer: UsageAnswer) -> Used:
    match answer:
        case SoftBreach():
            for each in overriding(running.worker.app.middleware, "soft_limit"):
                try:
                    each.soft_limit(Context(running), answer)
                except Exception:
                    log.exception("%s.soft_limit failed", type(each).__name__)
            return Used(remaining=answer.remaining, soft_breach=answer)
        case AlreadyApplied():
            return Used(remaining=answer.remaining, is_recorded=True)
        case UsageOk():
            return Used(remaining=answer.remaining)
        case _:
            raise AssertionError(f"not an answer to a report: {type(answer).__name__}")


async def _budget_name(running: Running, budget_id: BudgetId) -> str:
    known = running.worker.app.limit_names.name_of(budget_id)
    if known is not None:
        return known
    with running.calling():
        return (await running.worker.engine.get_budget_status(budget_id)).name


async def _breached(running: Running, breach: HardBreach, needs: Needs, place: Place | None) -> None:
    """Do what the task says about a call that does not fit; returns if it fits meanwhile."""
    name = await _budget_name(running, breach.budget_id)
    error = BudgetExceeded(
        name,
        breach.dimension,
        used=breach.current_usage,
        held=breach.held,
        limit=breach.hard_limit,
        asked=breach.requested,
        budget_id=breach.budget_id,
        execution_id=running.claimed.execution_id,
    )
    if running.task.on_budget == "pause":
        await _stop(running, needs, error)
        return
    if running.task.on_budget == "fail":
        running.breach = error
    elif place is not None:
        text, details = encode_error(error, sealed=False)
        await running.ask(_breach_of(place), "result")
        await running.record(NewStep(name=_breach_of(place), kind="result", error=text, result=details))
    raise error


async def _stop(running: Running, needs: Needs, error: BudgetExceeded) -> None:
    told.say(logging.INFO, running, "pauses until there is room: %s", error.detail)
    if calling_thread.get() is not None:
        running.needs, running.unwound_at = needs, Gate()
        raise Interrupted(_WAITS)
    if not in_step.get():
        with running.order.holding():
            await _rest(running)
    await pause(running, needs)
    await running.check()


async def _rest(running: Running) -> None:
    """Wait until no other branch of the handler runs a step, whose result a pause would lose, or settles what it cost.

    Not forever: a step may wait for something that this branch has.
    """
    deadline = asyncio.get_running_loop().time() + _LONGEST_REST
    turns, wait = 0, _FIRST_REST
    while turns < STEADY and asyncio.get_running_loop().time() < deadline:
        if running.steps or running.tasks.calling or running.order.is_held:
            turns = 0
            await asyncio.sleep(wait)
            wait = min(wait * 2, _MOST_REST)
        else:
            turns, wait = turns + 1, _FIRST_REST
            await asyncio.sleep(0)


async def pause(running: Running, needs: Needs) -> str | None:
    """Give the execution back until every budget covers what it needs; `covered` if they do already."""

    async def call() -> str | None:
        done = await running.worker.engine.pause_for_budget(running.handle, needs.amounts, needs.budgets)
        return None if done.paused else "covered"

    return await leave(running, call, _WAITS)
