"""Our own side of whole workers: the same jobs through `@app.task`, `submit_many` and `Worker`."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop

import flowfabric as ff
from benchmarks.harness import Sizes
from benchmarks.jobs import STEPS, TOKENS, payload
from benchmarks.processes import Board, Starter
from benchmarks.product import migrate_database

_FILL_BATCH = 1_000

# What the handlers write on; only a worker process has one.
_board: Board
_slot = 0
_ran = 0

app = ff.App()


@app.task
async def noop(body: str) -> None:
    _count()


@app.task
async def stamp(number: int, body: str) -> None:
    _board[number] = time.perf_counter_ns()


@app.task
async def waits(ctx: ff.Context, number: int) -> None:
    await ctx.wait_for("go")
    _board[number] = time.perf_counter_ns()


@app.task
async def steps(ctx: ff.Context, body: str) -> None:
    for name in STEPS:
        await ctx.step(name, _nothing)
    _count()


@app.task
async def three_steps(ctx: ff.Context, body: str) -> None:
    for name in STEPS[:3]:
        await ctx.step(name, _nothing)
    _count()


@app.task
async def usages(ctx: ff.Context, body: str) -> None:
    for _ in range(3):
        await ctx.usage(tokens=1)
    _count()


@app.task
async def spends(ctx: ff.Context, number: int) -> None:
    await ctx.usage(tokens=2)
    _board[number] = time.perf_counter_ns()


@app.task
async def relay(number: int) -> None:
    _board[2 * number] = time.perf_counter_ns()
    await asyncio.sleep(0)
    _board[2 * number + 1] = time.perf_counter_ns()


@app.task
async def tokens(ctx: ff.Context, body: str) -> None:
    for number in range(TOKENS):
        await ctx.emit(f"token {number}", type="delta")
        await asyncio.sleep(0)  # a model needs time for a token; other handlers run meanwhile
    _count()


async def _nothing() -> None:
    pass


def _count() -> None:
    global _ran
    _ran += 1
    _board[_slot] = _ran


class Tasks:
    program = "benchmarks.tasks"
    any_undone = "select exists (select from flowfabric.execution where state <> 'completed')::int"
    count_done = """
        select count(*) from flowfabric.execution e join flowfabric.route r on r.id = e.route
        where state = 'completed'
          and (r.kind <> 'steps' or (select count(*) from flowfabric.step s
                                     where s.partition = e.partition and s.id = e.id) = 5)
    """

    def __init__(self, dsn: str, sizes: Sizes, task: ff.Task[[str], None]) -> None:
        self._dsn = dsn
        self._sizes = sizes
        self._task = task

    def arguments(self, jobs: int) -> Sequence[str]:
        return ()

    async def prepare(self) -> None:
        await migrate_database(self._dsn)

    async def fill(self, jobs: int) -> None:
        async with connected(self._dsn):
            body = body_of(self._sizes)
            for start in range(0, jobs, _FILL_BATCH):
                await self._task.submit_many([body] * min(_FILL_BATCH, jobs - start))

    async def submitters(self, count: int) -> Sequence[_Submitter]:
        made = connected(self._dsn, connections=count)
        await made.client()
        return [_Submitter(made, body_of(self._sizes)) for _ in range(count)]


def noops(sizes: Sizes) -> Callable[[str], Tasks]:
    return lambda dsn: Tasks(dsn, sizes, noop)


def hundred_tokens(sizes: Sizes) -> Callable[[str], Tasks]:
    return lambda dsn: Tasks(dsn, sizes, tokens)


def five_steps(sizes: Sizes) -> Callable[[str], Tasks]:
    return lambda dsn: Tasks(dsn, sizes, steps)


class _Submitter:
    def __init__(self, app: ff.App, body: str) -> None:
        self._app = app
        self._body = body

    async def submit_one(self) -> None:
        await noop.submit(self._body)

    async def submit_many(self, jobs: int) -> None:
        await noop.submit_many([self._body] * jobs)

    async def stamp(self, numbers: Sequence[int]) -> None:
        if len(numbers) == 1:
            await stamp.submit(numbers[0], self._body)
        else:
            await stamp.submit_many([(number, self._body) for number in numbers])

    async def close(self) -> None:
        await self._app.close()


def connected(dsn: str, connections: int = 1) -> ff.App:
    """The app, for a database of this moment."""
    app.dsn = dsn
    app.connections = connections
    return app


def body_of(sizes: Sizes) -> str:
    # Its payloads are JSON.
    return base64.b64encode(payload(sizes.payload_bytes))[: sizes.payload_bytes].decode()


async def _process(starter: Starter, dsn: str) -> None:
    app.dsn = dsn
    async with ff.Worker(app):  # every setting is the default
        # The worker is connected; its claims begin with the next turn of the loop, so the wait holds the loop.
        starter.wait_go()
        await starter.stopped()


if __name__ == "__main__":
    _starter = Starter()
    _board, _slot = Board(Path(sys.argv[2])), int(sys.argv[3])
    uvloop.run(_process(_starter, sys.argv[1]))
    _starter.finish()
