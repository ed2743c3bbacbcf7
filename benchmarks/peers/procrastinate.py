"""procrastinate: psycopg pool of 20, concurrency 10, jobs deferred in batches."""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
import time
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
        [submitter] = await self.submitters(1)
        for start in range(0, jobs, _FILL_BATCH):
            await submitter.submit_many(min(_FILL_BATCH, jobs - start))
        await submitter.close()

    async def submitters(self, count: int) -> Sequence[_Submitter]:
        size = self._sizes.payload_bytes
        # Its payloads are JSON.
        body = base64.b64encode(payload(size))[:size].decode()
        return [await _Submitter.open(self._dsn, body) for _ in range(count)]


class _Submitter:
    def __init__(self, app: procrastinate.App, body: str) -> None:
        self._app = app
        self._body = body
        self._noop = app.task(name="noop")(_noop)
        self._stamp = app.task(name="stamp")(_stamp)

    @classmethod
    async def open(cls, dsn: str, body: str) -> _Submitter:
        app = _app(dsn, pool=1)
        await app.open_async()
        return cls(app, body)

    async def submit_one(self) -> None:
        await self._noop.defer_async(body=self._body)

    async def submit_many(self, jobs: int) -> None:
        arguments: dict[str, JSONValue] = {"body": self._body}
        await self._noop.batch_defer_async(*[arguments] * jobs)

    async def stamp(self, numbers: Sequence[int]) -> None:
        if len(numbers) == 1:
            await self._stamp.defer_async(number=numbers[0], body=self._body)
        else:
            items: list[dict[str, JSONValue]] = [{"number": number, "body": self._body} for number in numbers]
            await self._stamp.batch_defer_async(*items)

    async def close(self) -> None:
        await self._app.close_async()


def _app(dsn: str, pool: int = _POOL) -> procrastinate.App:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=pool, max_size=pool))


async def _noop(body: str) -> None:
    pass


async def _stamp(number: int, body: str) -> None:
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

    @app.task(name="stamp")
    async def stamp(number: int, body: str) -> None:
        board[number] = time.perf_counter_ns()

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
