"""procrastinate: psycopg pool of 20, concurrency 10, jobs deferred in batches."""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
import time

import procrastinate
import psycopg
import uvloop
from procrastinate.types import JSONValue

from benchmarks.harness import Sizes, check_all_done
from benchmarks.jobs import payload
from benchmarks.peers import drain_in_a_process

_POOL = 20
_CONCURRENCY = 10
_FILL_BATCH = 500
_COUNT_DONE = "select count(*) from procrastinate_jobs where status = 'succeeded'"


class Procrastinate:
    def __init__(self, dsn: str, sizes: Sizes) -> None:
        self._dsn = dsn
        self._sizes = sizes
        self._jobs = 0

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
        self._jobs = jobs

    async def drain(self) -> float:
        seconds = await drain_in_a_process("benchmarks.peers.procrastinate", self._dsn, self._jobs)
        async with await psycopg.AsyncConnection.connect(self._dsn) as connection:
            row = await (await connection.execute(_COUNT_DONE)).fetchone()
        check_all_done(row[0] if row else 0, self._jobs)
        return seconds

    async def close(self) -> None:
        """Every step closes what it opened."""


def _app(dsn: str) -> procrastinate.App:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=_POOL, max_size=_POOL))


async def _noop(body: str) -> None:
    pass


async def _worker(dsn: str, jobs: int) -> float:
    logging.disable(logging.INFO)
    app = _app(dsn)
    ran = 0
    all_ran = asyncio.Event()

    @app.task(name="noop")
    async def noop(body: str) -> None:
        nonlocal ran
        ran += 1
        if ran == jobs:
            all_ran.set()

    async with app.open_async(), await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watcher:
        started = time.perf_counter()
        running = asyncio.create_task(app.run_worker_async(concurrency=_CONCURRENCY, install_signal_handlers=False))
        await all_ran.wait()
        while True:
            cursor = await watcher.execute(
                "select exists (select from procrastinate_jobs where status in ('todo', 'doing'))"
            )
            if (await cursor.fetchone()) == (False,):
                break
            await asyncio.sleep(0.002)
        seconds = time.perf_counter() - started
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return seconds


if __name__ == "__main__":
    print(uvloop.run(_worker(sys.argv[1], int(sys.argv[2]))))
