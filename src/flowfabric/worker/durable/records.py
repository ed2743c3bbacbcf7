"""The additions of a run to the record: its steps, and which answers of waits it has read."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from flowfabric.errors import ExecutionNotActive, FlowFabricError, LeaseLost
from flowfabric.values.step import NewStep

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


def read_answer(running: Running, name: str, use: int) -> None:
    """Note that the handler gets the answer of a wait. It is recorded with the next thing that is."""
    running.newly_read[name, use] = NewStep(name=name, n=use, kind="wait")


async def mark_read(running: Running) -> None:
    """Record which answers the handler has read, before something else that may follow from them is stored."""
    if running.newly_read:
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
        if step.kind == "wait":
            running.newly_read.pop((step.name, step.n), None)
    return at
