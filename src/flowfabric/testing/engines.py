"""Engines of the kit's workers: the next worker of an app takes over the connections of the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from flowfabric.app.app import App
from flowfabric.engine import Engine


class Engines:
    """One engine per app and event loop, for one worker at a time. A loop that ends closes its own."""

    def __init__(self) -> None:
        self._free: dict[tuple[asyncio.AbstractEventLoop, App], Engine] = {}
        self._lives: dict[Engine, tuple[asyncio.AbstractEventLoop, AsyncGenerator[Engine, None]]] = {}

    async def take(self, app: App, connect: Callable[[], Awaitable[Engine]]) -> Engine:
        loop = asyncio.get_running_loop()
        if engine := self._free.pop((loop, app), None):
            return engine
        life = _live(connect)  # a loop closes its async generators when it ends
        engine = await anext(life)
        self._lives[engine] = loop, life
        return engine

    def give(self, app: App, engine: Engine) -> None:
        self._free[asyncio.get_running_loop(), app] = engine

    async def close(self, engine: Engine) -> None:
        await self._lives.pop(engine)[1].aclose()

    def leave(self) -> list[tuple[asyncio.AbstractEventLoop, Coroutine[Any, Any, None]]]:
        """Forget all; returns the coroutines that close them, with their loops."""
        lives, self._lives = self._lives, {}
        self._free.clear()
        return [(loop, life.aclose()) for loop, life in lives.values()]


async def _live(connect: Callable[[], Awaitable[Engine]]) -> AsyncGenerator[Engine, None]:
    engine = await connect()
    try:
        yield engine
    finally:
        await engine.close()
