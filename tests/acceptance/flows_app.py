"""An app for the fault tests of flows, and a worker process of it that can kill itself at a given call.

Usage: python -m tests.acceptance.flows_app OPTIONS, with `DSN`, `LEDGER` and `DIE` in the environment as for
`waits_app`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from typing import Any

import flowfabric as ff
from flowfabric.app.flow_builder import Flow
from tests.acceptance.waits_app import die_at, note

app = ff.App(os.environ.get("DSN"), name="flows")


@app.task
async def square(ctx: ff.Context, n: int) -> int:
    """Does something that is remembered, and takes a moment."""
    await ctx.step("work", note, "square", ctx.execution_id, n=n)
    await asyncio.sleep(0.03)
    return n * n


@app.task
def total(ctx: ff.SyncContext, ns: list[int]) -> int:
    note("total", ctx.execution_id, ns=ns)
    time.sleep(0.03)
    return sum(ns)


@app.task
async def forever(ctx: ff.Context) -> int:
    await asyncio.sleep(3600)
    return -1


@app.task
async def grow(ctx: ff.Context, n: int) -> int:
    """Adds nodes to its own flow."""
    flow = ctx.flow()
    flow.add(total, [*flow.map(square, range(n), name="grown"), flow.here], name="grown sum")
    await flow.submit()
    await asyncio.sleep(0.03)
    return n


@app.task
async def outer(ctx: ff.Context, n: int) -> int:
    """Waits for a flow of its own."""
    run = await squares("inner", n).submit()
    return int((await run.result())["total"])


@app.task
def plain(ctx: ff.SyncContext, n: int) -> int:
    """The same in a thread."""
    return int(ctx.submit_flow(squares("inner", n)).result()["total"])


def squares(name: str, n: int) -> Flow:
    flow = app.flow(name)
    flow.add(total, flow.map(square, range(n)))
    return flow


def die_when_losers_are_cancelled() -> None:
    """Kill this process once a round of the duty did something."""
    real = ff.Engine.cancel_siblings

    async def deadly(self: ff.Engine, **options: Any) -> Any:
        answer = await real(self, **options)
        if answer.cancelled:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    ff.Engine.cancel_siblings = deadly


def main() -> None:
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if os.environ.get("DIE") == "cancel_siblings after":
        die_when_losers_are_cancelled()
    elif "DIE" in os.environ:
        die_at(*os.environ["DIE"].split())
    options: dict[str, Any] = json.loads(sys.argv[1])
    ff.Worker(app, **options).main()


if __name__ == "__main__":
    main()
