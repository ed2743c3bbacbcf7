"""Wait in a test until something has happened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

PATIENCE = 60.0
"""Seconds after which what should have happened counts as missing. Nothing waits this long when all is well."""


async def until(condition: Callable[[], Awaitable[Any] | Any]) -> Any:
    """Wait until the condition is true; returns what it returned."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.005)
