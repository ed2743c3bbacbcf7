"""The world of a module: one database that is wiped before every test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest_asyncio

from tests.conftest import fresh_database
from tests.interleave import Stage
from tests.sql.suspending import SuspendingWorld, open_suspending


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(server: str) -> AsyncIterator[SuspendingWorld]:
    """The database of the module."""
    async with open_suspending(server) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: SuspendingWorld) -> SuspendingWorld:
    """The database of the module, without the rows of the test before."""
    await shared.wipe()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(server: str) -> AsyncIterator[Stage]:
    """The database of the module, for parties that act at the same time; a test empties it when it needs to."""
    async with fresh_database(server) as dsn:
        made = Stage(dsn, await asyncpg.connect(dsn))
        yield made
        await made.close()
