"""What the SQL tests share: one event loop, and databases that are wiped before every test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from tests.databases import fresh_database
from tests.interleave import Party, Stage
from tests.kept import *  # noqa: F403 - its fixtures
from tests.sql.suspending import SuspendingWorld, open_suspending


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All asynchronous tests of this folder run in one event loop."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("asyncio"):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(server: str) -> AsyncIterator[SuspendingWorld]:
    """The database of all worlds."""
    async with open_suspending(server) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(shared: SuspendingWorld) -> SuspendingWorld:
    """The same without the rows of the test before."""
    await shared.wipe()
    return shared


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(server: str) -> AsyncIterator[Stage]:
    """The database for parties that act at the same time; a test empties it when it needs to."""
    async with fresh_database(server) as dsn:
        made = Stage(dsn, await asyncpg.connect(dsn))
        yield made
        await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def parties(stage: Stage) -> list[Party]:
    """Three of them, in the emptied database of the stage."""
    await stage.empty()
    return await stage.company(3)


@pytest_asyncio.fixture(loop_scope="session")
async def callers(world: SuspendingWorld) -> AsyncIterator[list[Party]]:
    """Two parties in the database of the world."""
    joined = [await Party.join(world.dsn) for _ in range(2)]
    yield joined
    for party in joined:
        await party.connection.close()
