"""The additions of a run to the record: its steps, and which answers of waits it has read."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from flowfabric.errors import ExecutionNotActive, FlowFabricError, LeaseLost
from flowfabric.values.step import NewStep, Step
from flowfabric.worker.durable.order import Turn, come, end, got, order_of

if TYPE_CHECKING:
    from flowfabric.worker.durable.running import Running


async def record(running: Running, step: NewStep) -> datetime | None:
    """Record a step; concurrent executions share calls."""
    await running.check()
    hook = running.worker.step_hook
    if hook is not None:
        await hook.before(running, step.name, step.n)
    answer = await store(running, *running.newly_read.values(), step)
    if hook is not None:
        await hook.after(running, step.name, step.n)
    return answer


async def record_end(running: Running, step: NewStep) -> Turn | None:
    """Record something that may end at any time, with its place. The handler gets it when its turn comes."""
    await running.check()
    hook = running.worker.step_hook
    if hook is not None:
        await hook.before(running, step.name, step.n)
    memory = running.loaded_memory or await running.memory()
    place = memory.draw()
    order = order_of(running)
    turn = None if order is None else order.end(place)
    try:
        await store(running, *running.newly_read.values(), msgspec.structs.replace(step, place=place))
    except BaseException:
        if turn is not None:
            turn.leave()
        raise
    if hook is not None:
        await hook.after(running, step.name, step.n)
    if turn is None:
        got(memory, place)
    return turn


async def ended(running: Running, name: str, use: int, kind: Literal["sleep", "wait"], known: Step | None) -> None:
    """Wait for the turn of a sleep or a wait that has ended. Its end is recorded with the next record."""
    if known is not None and known.place is not None:
        await come(running, known)
    else:
        place = await end(running)
        running.newly_read[kind, name, use] = NewStep(name=name, n=use, kind=kind, place=place)


async def mark_read(running: Running) -> None:
    """Record what has ended, before something else that may follow from it is stored.

    Sleeps alone can wait for the next record while there is one branch: their order is that of its code.
    """
    if running.newly_read and (running.has_order or any(kind == "wait" for kind, _, _ in running.newly_read)):
        await store(running, *running.newly_read.values())


async def store(running: Running, *steps: NewStep) -> datetime | None:
    """Record steps in this order, in one call if possible; returns the verdict on the last."""
    at: datetime | None = None
    with running.calling():
        for sent in [running.worker.reports.record(running.handle, step) for step in steps]:
            answer = await sent
            if isinstance(answer, FlowFabricError):
                if isinstance(answer, LeaseLost | ExecutionNotActive):
                    running.worker.handlers.lost(running, answer)
                raise answer
            at = answer
    for step in steps:
        if step.place is not None:
            running.newly_read.pop((step.kind, step.name, step.n), None)
    return at
