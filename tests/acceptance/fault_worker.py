"""A worker process for the fault tests: it claims, works, reports, and writes everything to a ledger first.

Usage: python fault_worker.py DSN LEDGER STOP_FILE NAME. Each line of the ledger is on disk before the next step:
`effect` when the work was done (it ran from `since` to `at`, on the clock of the machine), `accepted` when the engine
accepted the result, `refused` when it did not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import flowfabric as ff
from flowfabric.values.attempt import Claimed, RetryScheduled


class Ledger:
    """A file that remembers: a line is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, claimed: Claimed, **more: object) -> None:
        line = {
            "what": what,
            "execution": str(claimed.execution_id),
            "attempt": str(claimed.handle.attempt_id),
            "index": claimed.handle.attempt_index,
            **more,
        }
        os.write(self._fd, (json.dumps(line) + "\n").encode())
        os.fsync(self._fd)


async def work(engine: ff.Engine, claimed: Claimed, ledger: Ledger) -> None:
    """One job. A job that says `flaky` fails its first attempt that gets this far."""
    since = time.monotonic()
    await asyncio.sleep(random.uniform(0.0, 0.04))
    ledger.write("effect", claimed, since=since, at=time.monotonic())
    try:
        if claimed.input_payload == b"flaky" and claimed.retry_count == 0:
            answer = await engine.fail(claimed.handle, "flaky")
            assert isinstance(answer, RetryScheduled)
            ledger.write("accepted", claimed, answer="retry")
        else:
            await engine.complete(claimed.handle, str(claimed.handle.attempt_id).encode())
            ledger.write("accepted", claimed, answer="completed")
    except ff.FlowFabricError as error:
        ledger.write("refused", claimed, answer=error.kind)


async def connected(dsn: str) -> ff.Engine:
    """Connect, also to a server that is killed while this worker starts."""
    while True:
        try:
            return await ff.Engine.connect(dsn, reconnect_for=timedelta(seconds=60))
        except ff.FlowFabricError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(0.1)


async def main(dsn: str, ledger: Ledger, stop: Path, name: str) -> None:
    async with await connected(dsn) as engine, ff.Duties(engine):
        running: set[asyncio.Task[None]] = set()
        while not stop.exists():
            found = await engine.claim_many(
                limit=4,
                worker_id="pool",
                worker_instance_id=name,
                lease_ttl=timedelta(seconds=1),
                max_wait=timedelta(milliseconds=500),
            )
            running = {asyncio.create_task(work(engine, claimed, ledger)) for claimed in found}
            if running:
                await asyncio.wait(running)
            for task in running:
                task.result()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Ledger(Path(sys.argv[2])), Path(sys.argv[3]), sys.argv[4]))
