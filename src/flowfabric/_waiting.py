"""Interruptible sleep, for every loop that waits for a time or a wake-up."""

from __future__ import annotations

import asyncio


async def first_of(seconds: float, *events: asyncio.Event | None) -> None:
    """Sleep until the time has passed or one of the events is set; None is an event that is never set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events if event is not None]
    try:
        if waits:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)
    finally:
        for wait in waits:
            wait.cancel()
