"""An app for the worker's fault tests, and a worker process of it.

Usage: python worker_app.py OPTIONS, with the options of the worker as JSON. `DSN` is the database, `LEDGER` a file to
which every handler writes what it does; a line is in the file before the next thing begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import flowfabric as ff
from flowfabric._duties import WorkerRegistryTtlSweep
from flowfabric._postgres import database as database_module
from flowfabric._postgres import listen
from flowfabric.worker import second_thread, worker

app = ff.App(os.environ.get("DSN"), name="faults", **json.loads(os.environ.get("APP", "{}")))


def note(what: str, execution_id: object, **more: object) -> None:
    line = json.dumps({"what": what, "execution": str(execution_id), "pid": os.getpid(), **more}) + "\n"
    fd = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


@app.task
async def job(ctx: ff.Context, seconds: float = 0) -> int:
    note("begun", ctx.execution_id, attempt=ctx.attempt_index, resumed=ctx.is_resumed)
    await asyncio.sleep(0 if ctx.is_resumed else seconds)
    note("ended", ctx.execution_id, attempt=ctx.attempt_index)
    return ctx.attempt_index


@app.task
async def gated(ctx: ff.Context) -> int:
    """Ends when the test lets it: when there is a file beside the ledger."""
    note("begun", ctx.execution_id, attempt=ctx.attempt_index)
    while not os.path.exists(os.environ["LEDGER"] + ".go"):
        await asyncio.sleep(0.01)
    note("ended", ctx.execution_id, attempt=ctx.attempt_index)
    return ctx.attempt_index


@app.task
def plain(ctx: ff.SyncContext, seconds: float = 0) -> int:
    note("begun", ctx.execution_id, attempt=ctx.attempt_index)
    time.sleep(seconds)
    note("ended", ctx.execution_id, attempt=ctx.attempt_index)
    return ctx.attempt_index


@app.task(retry=ff.RetryPolicy(max_retries=5, backoff=ff.Fixed(0.01)))
async def stepped(ctx: ff.Context, fails: bool) -> list[int]:
    """Three steps, of which the second fails once if it is told to, and a child."""
    made: list[int] = []
    for number in range(3):
        if number == 1 and fails and ctx.retry_count == 0:
            raise ValueError("flaky")
        made.append(await ctx.step(f"step {number}", act, ctx, number))
    made.append(await (await job.submit(0.0)).result() * 0)
    note("ended", ctx.execution_id, attempt=ctx.attempt_index)
    return made


async def act(ctx: ff.Context, number: int) -> int:
    await asyncio.sleep(0.005)
    note(f"step {number}", ctx.execution_id, attempt=ctx.attempt_index)
    return number


@app.task
async def tells(ctx: ff.Context, count: int) -> None:
    """Emits numbers, of which the ledger has those that were acknowledged; a worker with `HOLD` stops half way."""
    note("begun", ctx.execution_id, attempt=ctx.attempt_index)
    for number in range(count):
        if "HOLD" in os.environ and number == count // 2:
            await asyncio.Event().wait()
        waits = number % 10 == 9
        await ctx.emit(str(number), durability_mode="durable" if waits else "buffered")
        if waits:
            note("acknowledged", ctx.execution_id, attempt=ctx.attempt_index, number=number)
            await asyncio.sleep(0.01)


@app.task
async def blocks(ctx: ff.Context, seconds: float) -> None:
    """Holds up the loop."""
    note("begun", ctx.execution_id)
    time.sleep(seconds)


@app.task
async def endless(ctx: ff.Context) -> None:
    note("begun", ctx.execution_id)
    while True:
        pass


@app.task
async def ignores(ctx: ff.Context) -> None:
    note("begun", ctx.execution_id)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@app.task
async def hides(ctx: ff.Context) -> None:
    """Leaves a thread behind that the interpreter would wait for."""
    note("begun", ctx.execution_id)
    await asyncio.to_thread(time.sleep, 3600)


@app.task
async def poison(ctx: ff.Context) -> None:
    note("begun", ctx.execution_id, attempt=ctx.attempt_index)
    if ctx.attempt_index % 2:
        os._exit(9)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if os.environ.get("LOOP") == "asyncio":
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # as if it were not installed
    if "PATIENCE" in os.environ:  # of the connections, so that a test need not wait as long as an operator would
        seconds = float(os.environ["PATIENCE"])
        database_module._CONNECT_TIMEOUT = listen._ASK_AFTER = seconds
        worker._PATIENCE = second_thread._PATIENCE = timedelta(seconds=seconds)
    if "SWEEP_SECONDS" in os.environ:
        WorkerRegistryTtlSweep.interval = timedelta(seconds=float(os.environ["SWEEP_SECONDS"]))
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options: dict[str, Any] = json.loads(sys.argv[1])
    ff.Worker(app, **options).main()


if __name__ == "__main__":
    main()
