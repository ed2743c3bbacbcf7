"""HTTP clients that cost little: keep-alive connections that send bytes made before, and read what a figure needs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import cast

_PATIENCE = 300.0
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class _Asking(asyncio.Protocol):
    """Sends the next request as soon as the answer to the last is complete."""

    def __init__(self, next_request: Callable[[], bytes | None], done: asyncio.Future[None]) -> None:
        self._next = next_request
        self._done = done
        self._data = b""
        self._missing = -1  # bytes of the body; -1: the head is not complete
        self.took: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none
        self._send()

    def _send(self) -> None:
        request = self._next()
        if request is None:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
        self._begun = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._missing < 0:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201")):
                self._fail(f"unexpected answer: {self._data[:500]!r}")
                return
            found = _LENGTH.search(head)
            self._missing = int(found[1]) if found else 0
            self._data = rest
        if len(self._data) >= self._missing:
            self.took.append(time.perf_counter() - self._begun)
            self._data, self._missing = b"", -1
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed the connection")

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(RuntimeError(why))


async def ask_all(port: int, requests: Sequence[bytes], clients: int) -> tuple[float, list[float]]:
    """Send all requests on this many connections; returns the seconds for all, and those of each."""
    loop = asyncio.get_running_loop()
    rest = iter(requests)
    dones = [loop.create_future() for _ in range(clients)]
    begun = time.perf_counter()
    made = [
        (await loop.create_connection(lambda done=done: _Asking(lambda: next(rest, None), done), "127.0.0.1", port))[1]  # type: ignore[misc]
        for done in dones
    ]
    async with asyncio.timeout(_PATIENCE):
        await asyncio.gather(*dones)
    return time.perf_counter() - begun, [one for client in made for one in client.took]


class Follower(asyncio.Protocol):
    """A client of server-sent events: when it got each event with data."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._last = b""
        self.is_open = asyncio.get_running_loop().create_future()
        self.received_at: list[float] = []
        self.text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.is_open.done():
            self.text += data
            if b"\r\n\r\n" in self.text and b"\n\n" in self.text.partition(b"\r\n\r\n")[2]:
                if not self.text.startswith(b"HTTP/1.1 200"):
                    self.is_open.set_exception(RuntimeError(f"unexpected answer: {self.text[:500]!r}"))
                    return
                self.text = b""
                self.is_open.set_result(None)
            return
        # An event is written in one piece, which the loopback device does not divide.
        for _ in range(data.count(b"data:")):
            self.received_at.append(now)
        self._last = data

    @property
    def last_event(self) -> bytes:
        """The last event, without its chunk."""
        return self._last.partition(b"\r\n")[2].removesuffix(b"\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_open.done():
            self.is_open.set_exception(RuntimeError("the server closed the connection"))


async def follow(port: int, request: bytes, clients: int) -> list[Follower]:
    """Connect this many followers, and wait until the server has begun to answer each."""
    loop = asyncio.get_running_loop()
    made: list[Follower] = []
    for _ in range(clients):
        _, one = await loop.create_connection(lambda: Follower(request), "127.0.0.1", port)
        made.append(one)
        if len(made) % 50 == 0:
            await asyncio.gather(*(each.is_open for each in made))
    await asyncio.gather(*(each.is_open for each in made))
    return made
