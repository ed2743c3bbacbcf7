"""A proxy between a test's connections and the server: the network that hangs, or is gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit, urlunsplit

SOCKET = ".s.PGSQL.5432"


class Proxy:
    """A proxy between workers and the server: forwards, hangs without closing, or is gone."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Gone: open connections are cut off, new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        while True:
            await asyncio.sleep(0.01)  # connections that were accepted begin, aborted ones end
            if not self._serving:
                return
            for serving in self._serving:
                serving.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    def hang(self) -> None:
        """Nothing passes any more, and neither side is notified."""
        self._flows.clear()

    def flow(self) -> None:
        """What was held back passes."""
        self._flows.set()

    def flow_anew(self) -> None:
        """New connections work; the earlier ones never get another byte."""
        self._flows = asyncio.Event()
        self._flows.set()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._upstream)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        flows = self._flows
        writers = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                await flows.wait()
                behind_reader, behind_writer = await self._connect()
                writers.append(behind_writer)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._copy(reader, behind_writer, flows))
                    both.create_task(self._copy(behind_reader, writer, flows))
            finally:
                for one in writers:
                    one.transport.abort()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await flows.wait()
                writer.write(data)
        await flows.wait()
        writer.close()


@contextlib.asynccontextmanager
async def proxies(dsn: str, count: int = 1) -> AsyncIterator[tuple[str, list[Proxy]]]:
    """A DSN that leads through as many proxies as alternatives."""
    parts = urlsplit(dsn)
    (host,) = parse_qs(parts.query)["host"]
    made = [Proxy(f"{host}/{SOCKET}") for _ in range(count)]
    for proxy in made:
        await proxy.open()
    hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in made)
    try:
        yield urlunsplit(parts._replace(netloc=f"{parts.username}@{hosts}", query="")), made
    finally:
        for proxy in made:
            await proxy.close()
        # Connections that a killed worker left half open in the proxy are collected here, not in another test.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
