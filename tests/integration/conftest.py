"""A wiped database, an app on it, the kit and an app that uses it; a module may define its own under the same name.

A module whose tests ask what a fresh database has, or who is connected to it, imports `new_database`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.testing import Kit
from tests.wiped import Wiped, WipedServer, wiped_database, wiped_plain_engine  # noqa: F401 - fixtures among them


class Ledger(list[str]):
    """What was really done, in order."""

    def entry(self, what: str, answer: Any = None) -> Callable[..., Any]:
        """A function that notes that it was called."""

        def do(*_: Any) -> Any:
            self.append(what)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return do

    def coroutine(self, what: str, answer: Any = None) -> Callable[..., Awaitable[Any]]:
        async def do(*_: Any) -> Any:
            await asyncio.sleep(0)
            return self.entry(what, answer)()

        return do


@pytest.fixture
def did() -> Ledger:
    return Ledger()


@pytest.fixture
async def app(database: str, wiped: Wiped) -> AsyncIterator[ff.App]:
    """An app whose database passes the audit afterwards, with no execution left parked."""
    app = ff.App(database)
    yield app
    assert wiped.audit(database) == []
    assert wiped.rows(database, "waiter") == 0
    await app.close()


@pytest.fixture
def kit(flowfabric_kit: Kit, flowfabric_server: WipedServer) -> Iterator[Kit]:
    """The kit, whose database passes the audit afterwards."""
    yield flowfabric_kit
    assert flowfabric_server.audit(flowfabric_kit.dsn) == []


@pytest.fixture
def kit_app(kit: Kit) -> ff.App:
    app = ff.App("postgresql://nobody@nowhere/nothing")
    kit.use(app)
    return app


@pytest.fixture
async def switch(server: str, database: str) -> AsyncIterator[Callable[[bool], Awaitable[None]]]:
    """Allows connections to the test's database, or ends them all and allows none."""
    admin: asyncpg.Connection[Any] = await asyncpg.connect(server)
    name = urlsplit(database).path[1:]

    async def turn(on: bool) -> None:
        await admin.execute(f"alter database {name} allow_connections {str(on).lower()}")
        if not on:
            await admin.execute("select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = $1", name)

    try:
        yield turn
        await turn(True)
    finally:
        await admin.close()
