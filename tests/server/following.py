"""A client of server-sent events: reads them as the standard says, from the app itself, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

import msgspec

PATIENCE = 60.0


class Got(NamedTuple):
    """One block of the body: an event; with an id alone, or nothing but a comment, it has no data."""

    name: str | None = None
    data: str | None = None
    id: str | None = None
    comment: str | None = None

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.data or "null")


def parse(block: str) -> Got:
    """One block of lines up to an empty one."""
    name = place = comment = None
    data: list[str] = []
    for line in block.split("\n"):
        field, colon, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "" if colon:
                comment = value
            case "event":
                name = value
            case "data":
                data.append(value)
            case "id":
                place = value
            case "retry":
                assert value.isdigit()
            case _:
                raise AssertionError(f"no line of an event: {line!r}")
    return Got(name, "\n".join(data) if data else None, place, comment)


class Following:
    """A request whose answer is followed while it is written."""

    def __init__(self, app: Any, path: str, *, key: str = "", last_id: str | None = None, **params: Any) -> None:
        headers = [(b"host", b"server"), (b"accept", b"text/event-stream")]
        if key:
            headers.append((b"authorization", key.encode()))
        if last_id is not None:
            headers.append((b"last-event-id", last_id.encode()))
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": urlencode(params, doseq=True).encode(),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
            "extensions": {"flowfabric.abort": self._abort},
        }
        self._blocks: asyncio.Queue[Got | None] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._gone = asyncio.Event()
        self.reads = asyncio.Event()  # cleared: a client that takes nothing
        self.reads.set()
        self.was_aborted = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.last_id: str | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._app(self._scope, self._receive, self._send))
        async with asyncio.timeout(PATIENCE):
            await self._begun.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Close the connection; the server's part of it ends."""
        self._gone.set()
        self.reads.set()
        async with asyncio.timeout(PATIENCE):
            await self._task

    async def ended(self) -> None:
        """Wait until the server has ended the response."""
        async with asyncio.timeout(PATIENCE):
            await self._task

    def _abort(self) -> None:
        self.was_aborted = True
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        await self.reads.wait()
        self.body += message.get("body", b"")
        self._begun.set()
        if self.status == 200 and self.headers.get("content-type") == "text/event-stream":
            while b"\n\n" in self.body:
                block, _, self.body = self.body.partition(b"\n\n")
                self._blocks.put_nowait(parse(block.decode()))
        if not message.get("more_body", False):
            self._blocks.put_nowait(None)

    @property
    def problem(self) -> Any:
        """The body of a refusal."""
        return msgspec.json.decode(self.body)

    async def block(self) -> Got | None:
        """The next block, whatever it is; None: the response has ended."""
        async with asyncio.timeout(PATIENCE):
            found = await self._blocks.get()
        if found is not None and found.id is not None:
            self.last_id = found.id
        return found

    async def event(self) -> Got:
        """The next event with data."""
        while True:
            found = await self.block()
            assert found is not None, "the response has ended"
            if found.data is not None:
                return found

    async def events(self, count: int) -> list[Got]:
        return [await self.event() for _ in range(count)]

    async def until(self, wanted: Callable[[Got], bool]) -> Got:
        """The next block of a kind."""
        while True:
            found = await self.block()
            assert found is not None, "the response has ended"
            if wanted(found):
                return found


Follow = Callable[..., Following]
"""What the fixture `follow` is."""
