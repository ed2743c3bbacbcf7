"""absurd: the schema of the wheel absurdctl, a sync worker that claims 100, tasks spawned in one transaction.

A worker of its SDK has one connection. Several of them in one process, each in its thread, is nothing its
documentation speaks of; it is measured as well because it is faster.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import absurdctl
import psycopg
from absurd_sdk import Absurd, JsonValue, TaskContext

from benchmarks.jobs import STEPS
from benchmarks.processes import Board, Starter

_BATCH = 100
_QUEUE = "default"


class AbsurdSteps:
    program = "benchmarks.peers.absurd"
    any_undone = f"select exists (select from absurd.t_{_QUEUE} where state <> 'completed')::int"
    count_done = f"""
        select count(*) from absurd.t_{_QUEUE} t
        where state = 'completed' and (select count(*) from absurd.c_{_QUEUE} c where c.task_id = t.task_id) = 5
    """

    def __init__(self, dsn: str, workers: int = 1) -> None:
        self._dsn = dsn
        self._workers = workers

    def arguments(self, jobs: int) -> Sequence[str]:
        return (str(self._workers),)

    async def prepare(self) -> None:
        await asyncio.to_thread(self._prepare)

    async def fill(self, jobs: int) -> None:
        await asyncio.to_thread(self._fill, jobs)

    def _prepare(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
            Absurd(connection, queue_name=_QUEUE).create_queue()

    def _fill(self, jobs: int) -> None:
        with psycopg.connect(self._dsn) as connection:
            app = Absurd(connection, queue_name=_QUEUE)
            for _ in range(jobs):
                app.spawn("steps", {}, queue=_QUEUE)


def _process(starter: Starter, dsn: str, board: Board, slot: int, workers: int) -> None:
    apps = [Absurd(dsn, queue_name=_QUEUE) for _ in range(workers)]
    ran = 0
    counting = threading.Lock()

    def steps(params: JsonValue, ctx: TaskContext) -> None:
        nonlocal ran
        for name in STEPS:
            ctx.step(name, _noop)
        with counting:
            ran += 1
            board[slot] = ran

    for app in apps:
        app.register_task("steps")(steps)
    starter.wait_go()
    threads = [threading.Thread(target=app.start_worker, kwargs={"batch_size": _BATCH // workers}) for app in apps]
    for thread in threads:
        thread.start()
    starter.wait_stop()
    for app in apps:
        app.stop_worker()
    for thread in threads:
        thread.join()
    for app in apps:
        app.close()


def _noop() -> None:
    pass


if __name__ == "__main__":
    _starter = Starter()
    _process(_starter, sys.argv[1], Board(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
    _starter.finish()
