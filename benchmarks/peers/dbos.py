"""DBOS on Postgres: worker_concurrency 200, polled every 0.1 s, workflows enqueued in one transaction.

A pool of 4 connections and 8 threads, because its own choice (20, and a thread for every running workflow) took a
third off its figure on two cores.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy
from dbos import DBOS, DBOSClient

from benchmarks.jobs import STEPS, TOKENS
from benchmarks.processes import Board, Starter

_QUEUE = "steps"
_CONCURRENCY = 200
_POLL_SECONDS = 0.1
_POOL = 4
_THREADS = 8


class DbosSteps:
    """Its worker takes what it finds from its start on, so it fills its own queue and commits when it may begin."""

    program = "benchmarks.peers.dbos"
    any_undone = "select exists (select from dbos.workflow_status where status in ('ENQUEUED', 'PENDING'))::int"
    count_done = """
        select count(*) from dbos.workflow_status w
        where status = 'SUCCESS' and name = 'steps'
          and (select count(*) from dbos.operation_outputs o where o.workflow_uuid = w.workflow_uuid) = 5
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def arguments(self, jobs: int) -> Sequence[str]:
        return (str(jobs),)

    async def prepare(self) -> None:
        """The launch of its worker makes the schema."""

    async def fill(self, jobs: int) -> None:
        """The worker has done it."""


class DbosStreams(DbosSteps):
    """The same with workflows that write a hundred values to a stream."""

    count_done = """
        select count(*) from dbos.workflow_status w
        where status = 'SUCCESS' and name = 'tokens'
          and (select count(*) from dbos.streams s where s.workflow_uuid = w.workflow_uuid) >= 100
    """

    def arguments(self, jobs: int) -> Sequence[str]:
        return (str(jobs), "tokens")


@DBOS.step()
def _noop() -> None:
    pass


def _process(starter: Starter, dsn: str, board: Board, slot: int, jobs: int, what: str = "steps") -> None:
    ran = 0
    counting = threading.Lock()  # its workflows are threads

    @DBOS.workflow(name="steps")
    def steps() -> None:
        nonlocal ran
        for _ in STEPS:
            _noop()
        with counting:
            ran += 1
            board[slot] = ran

    @DBOS.workflow(name="tokens")
    def tokens() -> None:
        nonlocal ran
        for number in range(TOKENS):
            DBOS.write_stream("out", f"token {number}")
        with counting:
            ran += 1
            board[slot] = ran

    @DBOS.workflow(name="warm_up")
    def warm_up() -> None:
        _noop()

    url = dsn.replace("postgresql://", "postgresql+psycopg://", 1)
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "sys_db_pool_size": _POOL,
            "max_executor_threads": _THREADS,
            "log_level": "ERROR",
        }
    )
    DBOS.launch()
    DBOS.register_queue(_QUEUE, worker_concurrency=_CONCURRENCY, polling_interval_sec=_POLL_SECONDS)
    DBOS.enqueue_workflow(_QUEUE, warm_up).get_result()
    client = DBOSClient(system_database_url=url, application_name="bench")
    with sqlalchemy.create_engine(url).begin() as connection:
        for _ in range(jobs):
            client.enqueue_in_transaction(connection, {"workflow_name": what, "queue_name": _QUEUE})
        starter.wait_go()
    starter.wait_stop()
    client.destroy()
    DBOS.destroy()


if __name__ == "__main__":
    _starter = Starter()
    _process(_starter, sys.argv[1], Board(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
    _starter.finish()
