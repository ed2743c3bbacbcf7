"""Many clients of one process: waiting costs no database connection, and nothing is left behind when they go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any

import asyncpg
import pytest_asyncio

import flowfabric as ff
from flowfabric.values.execution import NewExecution
from tests import sampling
from tests.server.following import Got
from tests.server.serving import Process, Socket, serving

PATIENCE = 120.0
POOL = 4


@pytest_asyncio.fixture(loop_scope="session")
async def begun(plain_engine: ff.Engine, sql: asyncpg.Connection[Any]) -> datetime:
    """When the connections of the test itself were open, and those of the server were not."""
    await plain_engine.ping()
    found: datetime = await sql.fetchval("select clock_timestamp()")
    return found


@pytest_asyncio.fixture(loop_scope="session")
async def process(database: str, begun: datetime) -> AsyncIterator[Process]:
    async with serving(database, "--connections", str(POOL), "--max-connections", "3000", "--no-duties") as made:
        yield made


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


class Watcher:
    """A client of the event log: what it got, in order."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.ended: list[str] = []
        self.is_open = asyncio.Event()
        self.was_told = False

    async def run(self, port: int) -> None:
        async with Socket(port) as socket:
            async for one in socket.follow("/v1/events?family=completion"):
                self.is_open.set()
                self.take(one)

    def take(self, one: Got) -> None:
        if one.name == "bye":
            self.was_told = True
        elif one.data is not None:
            self.ids.append(one.id or "")
            self.ended.append(one.json["execution_id"])


async def test_clients_that_wait_leave_the_database_to_those_that_work(
    process: Process, plain_engine: ff.Engine, sql: asyncpg.Connection[Any], begun: datetime
) -> None:
    many = 1000 if sampling.is_full() else 50
    made = await plain_engine.create_many([NewExecution(execution_kind="long") for _ in range(many)])
    waited_for = [str(one.execution_id) for one in made if not isinstance(one, ff.FlowFabricError)]
    watchers = [Watcher() for _ in range(many)]
    polls: list[asyncio.Task[tuple[int, Any]]] = []

    async def poll(execution_id: str) -> tuple[int, Any]:
        async with Socket(process.port) as socket:
            return await socket.ask("GET", f"/v1/executions/{execution_id}/outcome?wait=60")

    async with asyncio.timeout(PATIENCE), AsyncExitStack() as stack:
        following = [asyncio.ensure_future(one.run(process.port)) for one in watchers]
        for one in watchers:
            await one.is_open.wait()
        polls = [asyncio.ensure_future(poll(one)) for one in waited_for]
        client = await stack.enter_async_context(Socket(process.port))
        for number in range(20):
            status, submitted = await client.ask("POST", "/v1/executions", {"execution_kind": "short"})
            assert status == 201
            claim = {"worker_instance_id": f"pool-{number}", "kinds": ["short"]}
            status, granted = await client.ask("POST", "/v1/workers/pool/claim", claim)
            assert (status, granted["execution_id"]) == (200, submitted["execution_id"])
        connections = await sql.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and backend_start > $1", begun
        )
        assert 0 < connections <= POOL + 1  # and the one that listens
        assert not any(one.done() for one in (*polls, *following))

        held = await plain_engine.claim_many(
            worker_id="w", worker_instance_id="w-1", kinds=["long"], limit=min(many, 1000)
        )
        for answer in await plain_engine.complete_many([one.handle for one in held]):
            assert not isinstance(answer, ff.FlowFabricError)
        for status, outcome in await asyncio.gather(*polls):
            assert (status, outcome["public_state"]) == (200, "completed")
        await until(lambda: all(len(one.ids) == many for one in watchers))
        assert sorted(watchers[0].ended) == sorted(waited_for)
        assert all(one.ids == watchers[0].ids for one in watchers)

        # SIGTERM while all of them wait: streams are told, polls are answered.
        unended = await plain_engine.create_many([NewExecution(execution_kind="never") for _ in range(many)])
        polls = [asyncio.ensure_future(poll(str(one.execution_id))) for one in unended]
        while await sql.fetchval("select count(*) from flowfabric.watch where topic = 'ended'") < many:
            await asyncio.sleep(0.02)
        stopping = asyncio.ensure_future(process.stop())
        await asyncio.gather(*following)
        assert all(one.was_told for one in watchers)
        for status, outcome in await asyncio.gather(*polls):
            assert (status, outcome["is_ended"]) == (200, False)
        assert await stopping == 0


async def test_clients_that_come_and_go_leave_nothing_behind(process: Process, plain_engine: ff.Engine) -> None:
    many = 300 if sampling.is_full() else 60

    async def come_and_go() -> None:
        watchers = [Watcher() for _ in range(many)]
        following = [asyncio.ensure_future(one.run(process.port)) for one in watchers]
        for one in watchers:
            await one.is_open.wait()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    async with asyncio.timeout(PATIENCE):
        await come_and_go()
        await until(lambda: process.files < many)
        before = process.files
        for _ in range(3):
            await come_and_go()
        await until(lambda: process.files <= before)
        async with Socket(process.port) as client:
            assert (await client.ask("GET", "/v1/workers"))[0] == 200
