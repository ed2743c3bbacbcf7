"""Databases for tests: copies of the migrated template of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import asyncpg

from tests.support import in_database

_counter = iter(range(1_000_000))


@contextlib.asynccontextmanager
async def fresh_database(server: str) -> AsyncIterator[str]:
    """A copy of the template, dropped afterwards even if connections are open."""
    name = f"ff_{os.getpid()}_{next(_counter)}"
    admin = await asyncpg.connect(server)
    try:
        await admin.execute(f"create database {name} template ff_template strategy file_copy")
        try:
            yield in_database(server, name)
        finally:
            await admin.execute(f"drop database if exists {name} with (force)")
    finally:
        await admin.close()
