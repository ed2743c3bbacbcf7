"""The world of a module: one database that is wiped before every test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

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
