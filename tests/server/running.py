"""A server of the test's own process on a real socket, as `flowfabric server` runs it, without its signals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flowfabric.server.options import load_options
from flowfabric.server.process import ServerProcess, bind
from tests.server.following import PATIENCE


@asynccontextmanager
async def running(dsn: str, **options: Any) -> AsyncIterator[str]:
    """Serve this database; yields the address."""
    chosen = load_options({"listen": "127.0.0.1:0", "auth": "none", "duties": False, **options}, {})
    sock = bind(chosen)
    ready = asyncio.Event()
    process = ServerProcess(chosen, dsn, sock, on_ready=ready.set)
    serving = asyncio.create_task(process.serve())
    waiting = asyncio.create_task(ready.wait())
    try:
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield chosen.url(sock.getsockname()[1])
    finally:
        waiting.cancel()
        process._stop()
        async with asyncio.timeout(PATIENCE):
            await serving
        sock.close()
