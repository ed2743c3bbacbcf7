"""awa-pg: queue storage, COPY enqueue, 1,024 workers, claims of 1,024, one completion shard, uvloop, no deadlines.

It keeps finished jobs for about a second, then truncates the tables they were in.
"""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.harness import Sizes
from benchmarks.jobs import payload
from benchmarks.processes import Board, Starter

os.environ["AWA_COMPLETION_SHARDS"] = "1"
import awa

_QUEUE = "bench"
_WORKERS = 1_024
_CLAIM_BATCH = 1_024
_FILL_BATCH = 1_000
# Completions come in batches; those whose tables have been truncated are counted in the rollups.
_DONE = """
    (select coalesce(sum(completed_count), 0) from awa.receipt_completion_batches)
    + (select count(*) from awa.done_entries where state = 'completed')
    + (select coalesce(sum(pruned_completed_count), 0) from awa.queue_terminal_rollups)
"""


@dataclass
class Noop:
    body: str


@dataclass
class Stamp:
    number: int
    body: str


class Awa:
    program = "benchmarks.peers.awa"
    count_done = f"select {_DONE}"

    def __init__(self, dsn: str, sizes: Sizes) -> None:
        self._dsn = dsn
        self._sizes = sizes
        self._jobs = 0

    @property
    def any_undone(self) -> str:
        return f"select ({_DONE} < {self._jobs})::int"

    def arguments(self, jobs: int) -> Sequence[str]:
        return ()

    async def prepare(self) -> None:
        async with _client(self._dsn, connections=1) as client:
            await client.migrate()
            await client.install_queue_storage()

    async def fill(self, jobs: int) -> None:
        [submitter] = await self.submitters(1)
        for start in range(0, jobs, _FILL_BATCH):
            await submitter.submit_many(min(_FILL_BATCH, jobs - start))
        await submitter.close()
        self._jobs += jobs

    async def submitters(self, count: int) -> Sequence[_Submitter]:
        size = self._sizes.payload_bytes
        # Its payloads are JSON.
        body = base64.b64encode(payload(size))[:size].decode()
        return [_Submitter(_client(self._dsn, connections=1), body) for _ in range(count)]


class _Submitter:
    def __init__(self, client: awa.AsyncClient, body: str) -> None:
        self._client = client
        self._body = body

    async def submit_one(self) -> None:
        await self._client.insert(Noop(self._body), queue=_QUEUE)

    async def submit_many(self, jobs: int) -> None:
        await self._client.enqueue_many_copy([Noop(self._body)] * jobs, queue=_QUEUE)

    async def stamp(self, numbers: Sequence[int]) -> None:
        jobs = [Stamp(number, self._body) for number in numbers]
        if len(jobs) == 1:
            await self._client.insert(jobs[0], queue=_QUEUE)
        else:
            await self._client.enqueue_many_copy(jobs, queue=_QUEUE)

    async def close(self) -> None:
        await self._client.close()


def _client(dsn: str, connections: int = 10) -> awa.AsyncClient:
    # Its parser wants a host in the address even where a directory of sockets follows.
    return awa.AsyncClient(dsn.replace("@/", "@localhost/", 1), max_connections=connections)


async def _process(starter: Starter, dsn: str, board: Board, slot: int) -> None:
    client = _client(dsn)
    ran = 0

    @client.task(Noop, queue=_QUEUE)
    async def noop(job: awa.Job[Noop]) -> None:
        nonlocal ran
        ran += 1
        board[slot] = ran

    @client.task(Stamp, queue=_QUEUE)
    async def stamp(job: awa.Job[Stamp]) -> None:
        board[job.args.number] = time.perf_counter_ns()

    await client.queue_stats()  # connected
    await starter.go()
    queue = {
        "name": _QUEUE,
        "max_workers": _WORKERS,
        "claim_batch_size": _CLAIM_BATCH,
        "deadline_duration_ms": 0,
    }
    await client.start([queue])
    await starter.stopped()
    await client.shutdown()
    await client.close()


if __name__ == "__main__":
    _starter = Starter()
    uvloop.run(_process(_starter, sys.argv[1], Board(Path(sys.argv[2])), int(sys.argv[3])))
    _starter.finish()
