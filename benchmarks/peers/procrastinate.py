"""procrastinate: psycopg pool of 20, concurrency 10, jobs deferred in batches."""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import procrastinate
import uvloop
from procrastinate.types import JSONValue

from benchmarks.harness import Sizes
from benchmarks.jobs import payload
from benchmarks.processes import Board, Starter

_POOL = 20
_CONCURRENCY = 10
_FILL_BATCH = 500


class Procrastinate:
    program = "benchmarks.peers.procrastinate"
    any_undone = "select exists (select from procrastinate_jobs where status in ('todo', 'doing'))::int"
    count_done = "select count(*) from procrastinate_jobs where status = 'succeeded'"

    def __init__(self, dsn: str, sizes: Sizes) -> None:
        self._dsn = dsn
        self._sizes = sizes

    def arguments(self, jobs: int) -> Sequence[str]:
        return ()

    async def prepare(self) -> None:
        async with _app(self._dsn).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def fill(self, jobs: int) -> None:
        app = _app(self._dsn)
        size = self._sizes.payload_bytes
        # Its payloads are JSON.
        body = base64.b64encode(payload(size))[:size].decode()
        arguments: list[dict[str, JSONValue]] = [{"body": body}] * _FILL_BATCH
        task = app.task(name="noop")(_noop)
        async with app.open_async():
            for start in range(0, jobs, _FILL_BATCH):
                await task.batch_defer_async(*arguments[: jobs - start])


def _app(dsn: str) -> procrastinate.App:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=_POOL, max_size=_POOL))


async def _noop(body: str) -> None:
    pass


async def _process(starter: Starter, dsn: str, board: Board, slot: int) -> None:
    logging.disable(logging.INFO)
    app = _app(dsn)
    ran = 0

    @app.task(name="noop")
    async def noop(body: str) -> None:
        nonlocal ran
        ran += 1
        board[slot] = ran

    async with app.open_async():
        await starter.go()
        running = asyncio.create_task(app.run_worker_async(concurrency=_CONCURRENCY, install_signal_handlers=False))
        await starter.stopped()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    _starter = Starter()
    uvloop.run(_process(_starter, sys.argv[1], Board(Path(sys.argv[2])), int(sys.argv[3])))
    _starter.finish()
