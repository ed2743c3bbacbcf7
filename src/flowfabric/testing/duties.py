"""Running the duties immediately, and waiting until the workers are idle."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from flowfabric.client.flow_run import FlowRun
from flowfabric.client.run import Run
from flowfabric.engine import Engine
from flowfabric.engine.timers import TimerKind
from flowfabric.testing.worker import KitWorker
from flowfabric.worker.schedules import fire

PUMP = 0.05  # seconds between two rounds of the duties while handlers run


async def run_duties(engine: Engine) -> int:
    """Handle everything that is due now; returns how much that was."""
    handled = 0
    for kind in TimerKind:
        while True:
            done = await engine.run_timers(kind)
            handled += done.handled
            if not done.more or not done.handled:
                break
    while (hooks := await engine.submit_hooks()).handled:
        handled += hooks.handled
    handled += (await engine.reset_due_budgets()).handled
    handled += (await engine.collect_reservations(marked=True)).handled
    handled += (await engine.unblock_limited()).promoted
    for due in await engine.due_schedules():
        handled += await fire(engine, due)
    return handled + await _run_flow_duties(engine)


async def _run_flow_duties(engine: Engine) -> int:
    """Run the duties of flows until nothing is left; returns how much they did."""
    handled = 0
    while True:
        cascade = await engine.dispatch_cascades()
        siblings = await engine.cancel_siblings()
        children = await engine.cancel_children()
        members = await engine.reconcile_cancellations()
        done = cascade.finished + cascade.resolved + siblings.cancelled + siblings.already_terminal + members.handled
        done += children.cancelled + children.more
        handled += done
        if not done:
            return handled


async def keep_up(engine: Engine) -> None:
    while True:
        await run_duties(engine)
        await asyncio.sleep(PUMP)


async def until_idle(engine: Engine, workers: Collection[KitWorker], run: Run[Any] | FlowRun | None) -> None:
    """Wait until all workers are idle, one has crashed, or the run has ended; runs the duties meanwhile."""
    idle = asyncio.ensure_future(_idle(workers))
    waits: set[asyncio.Future[Any]] = {idle}
    if run is not None:
        waits.add(asyncio.ensure_future(run.wait() if isinstance(run, FlowRun) else run.outcome()))
    try:
        while not (await asyncio.wait(waits, timeout=PUMP, return_when=asyncio.FIRST_COMPLETED))[0]:
            await run_duties(engine)
        for wait in waits:
            if wait.done() and not any(worker.dead.is_set() for worker in workers):
                wait.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _idle(workers: Collection[KitWorker]) -> None:
    while True:
        before = sum(worker.begun for worker in workers)
        for worker in workers:
            await worker.settled()
            if worker.dead.is_set():
                return
        if before == sum(worker.begun for worker in workers):
            return


async def has_ended(engine: Engine, run: Run[Any] | FlowRun) -> bool:
    if isinstance(run, FlowRun):
        return not await run.live()
    return bool(await engine.read_outcomes([run.execution_id]))
