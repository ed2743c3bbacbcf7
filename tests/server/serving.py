"""A server in a process of its own, and clients that speak HTTP to it over a socket, without any library."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any, Self

import msgspec

from tests.server.following import PATIENCE, Got, parse

_SERVING = re.compile(rb"serving http://127\.0\.0\.1:(\d+)")


class Process:
    """A running `flowfabric server`."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    @property
    def files(self) -> int:
        """How many descriptors it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def stop(self) -> int:
        """Send SIGTERM, and wait for its exit."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def serving(dsn: str, *options: str) -> AsyncIterator[Process]:
    """Start a server of this database that asks for no keys."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "flowfabric.cli", "server", "--dsn", dsn, "--listen", "127.0.0.1:0", "--auth", "none",
        *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    said = b""
    reading: asyncio.Task[Any] | None = None
    try:
        async with asyncio.timeout(PATIENCE):
            while (found := _SERVING.search(said)) is None:
                line = await process.stderr.readline()
                assert line, f"the server did not start: {said.decode()}"
                said += line
        reading = asyncio.ensure_future(process.stderr.read())  # so that its log cannot fill the pipe
        yield Process(process, int(found[1]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if reading is not None:
            await reading


class Socket:
    """One connection: requests one after the other, or a stream of events."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request and its answer as JSON."""
        status, headers = await self.begin(method, path, body)
        length = int(headers.get("content-length", "0"))
        data = await self._reader.readexactly(length) if length else b""
        return status, msgspec.json.decode(data) if data else None

    async def begin(self, method: str, path: str, body: Any = None, **more: str) -> tuple[int, dict[str, str]]:
        """Send a request, and read the head of its answer."""
        data = b"" if body is None else msgspec.json.encode(body)
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", *(f"{name}: {value}" for name, value in more.items())]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(data)}"]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in head[1:])}
        return int(head[0].split(" ")[1]), headers

    async def follow(self, path: str, last_id: str | None = None) -> AsyncIterator[Got]:
        """The events of a path, until the response ends."""
        status, headers = await self.begin("GET", path, **({} if last_id is None else {"last-event-id": last_id}))
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        text = b""
        while size := int(await self._reader.readline() or b"0", 16):
            text += (await self._reader.readexactly(size + 2))[:-2]
            while b"\n\n" in text:
                block, _, text = text.partition(b"\n\n")
                yield parse(block.decode())
