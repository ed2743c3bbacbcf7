"""The server on a real socket: slow and long heads, too many connections, requests that try to be two."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flowfabric.server import protocol
from flowfabric.server.metrics import ServerMetrics
from tests.each import each
from tests.server.test_limits import SECRET, Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOTH = (HttpToolsProtocol, H11Protocol)
PATIENCE = 60.0
HEAD_BYTES = 8192


class Listening:
    """A server of this process, and raw connections to it."""

    def __init__(self, port: int, rig: Rig, metrics: ServerMetrics) -> None:
        self.port = port
        self.rig = rig
        self.metrics = metrics

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, data: bytes) -> bytes:
        """Send these bytes and read until the server closes the connection."""
        reader, writer = await self.connect()
        writer.write(data)
        async with asyncio.timeout(PATIENCE):
            try:
                found = await reader.read()
            except ConnectionError:
                found = b""
        writer.close()
        return found


@contextlib.asynccontextmanager
async def listening(
    base: Any, *, most: int = 100, head_seconds: float = 20.0, app: Any = None, **options: Any
) -> AsyncIterator[Listening]:
    rig, metrics = Rig(), ServerMetrics()
    made = protocol.protocol_class(
        metrics, most=most, head_bytes=HEAD_BYTES, head_seconds=head_seconds, base=base, **options
    )
    config = uvicorn.Config(
        app or rig.app,
        http=made,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=1 << 20,
    )
    server = uvicorn.Server(config)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    # The parts of `serve` that do not touch the signals of the test's process.
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup([sock])
    try:
        yield Listening(sock.getsockname()[1], rig, metrics)
    finally:
        server.force_exit = True
        await server.shutdown([sock])


def head(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    first, _, rest = answer.partition(b"\r\n")
    headers, _, body = rest.partition(b"\r\n\r\n")
    pairs = dict(line.split(": ", 1) for line in headers.decode().lower().split("\r\n"))
    return int(first.split()[1]), pairs, body


@each("base", BOTH)
async def test_a_head_that_does_not_arrive_is_refused_in_time(base: Any) -> None:
    async with listening(base, head_seconds=0.05) as server:
        for begun in (b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"G"):
            status, headers, body = head(await server.say(begun))
            assert status == 408
            assert headers["content-type"] == "application/problem+json"
            assert json.loads(body)["code"] == "slow_head"
        assert await server.say(b"") == b""  # says nothing: closed without an answer
        assert b'flowfabric_http_refused_total{reason="slow_head"} 2.0' in server.metrics.text(None)


@each("base", BOTH)
async def test_a_head_that_is_too_long_is_refused_while_it_arrives(base: Any) -> None:
    async with listening(base) as server:
        reader, writer = await server.connect()
        # One byte more than fits: bytes that the server does not read would make the system drop its answer.
        begun = b"GET /livez HTTP/1.1\r\nx: "
        writer.write(begun.ljust(HEAD_BYTES + 1, b"y"))
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
        writer.close()
        assert head(answer)[0] == 431


@each("base", BOTH)
async def test_a_connection_is_used_again_and_its_second_head_has_its_time_too(base: Any) -> None:
    async with listening(base, head_seconds=0.3) as server:
        reader, writer = await server.connect()
        for _ in range(2):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(PATIENCE):
                answer = await reader.readuntil(b"{}")
            assert head(answer)[0] == 200
        writer.write(b"GET /livez HTTP/1.1\r\nHost")
        async with asyncio.timeout(PATIENCE):
            assert head(await reader.read())[0] == 408
        writer.close()


@each("base", BOTH)
async def test_beyond_its_cap_a_server_refuses_connections_in_words(base: Any) -> None:
    async with listening(base, most=0) as server:
        held = [await server.connect() for _ in range(protocol.RESERVE)]
        while f"flowfabric_http_connections {protocol.RESERVE}.0" not in server.metrics.text(None).decode():
            await asyncio.sleep(0.005)
        status, headers, body = head(await server.say(b""))
        assert (status, json.loads(body)["code"]) == (503, "too_many_connections")
        assert headers["retry-after"] == "1"
        for _, writer in held:
            writer.close()


@each("base", BOTH)
async def test_an_oversize_chunked_body_is_refused_while_it_arrives(base: Any) -> None:
    async with listening(base) as server:
        reader, writer = await server.connect()
        start = f"POST /v1/notes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
        writer.write(start.encode() + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(10_000):
                writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                sent += 4096
                await writer.drain()
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                status, _, body = head(answer)
                assert status == 413
                assert json.loads(body)["limit_bytes"] == 64 * 1024
        assert sent < 40_000_000
        writer.close()


@each("base", BOTH)
async def test_what_arrives_of_a_body_after_its_answer_is_no_request(base: Any) -> None:
    start = b"POST /v1/notes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"  # without a key
    next_one = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    size = 4 * HEAD_BYTES
    async with asyncio.timeout(PATIENCE), listening(base) as server:
        for length, body in (
            (b"Content-Length: %d" % size, b"x" * size),
            (b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (size, b"x" * size)),
        ):
            reader, writer = await server.connect()
            writer.write(start + length + b"\r\n\r\n")
            assert head(await reader.readuntil(b"}"))[0] == 401
            for place in range(0, len(body), HEAD_BYTES):
                writer.write(body[place : place + HEAD_BYTES])
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(next_one)
            answers = await reader.read()
            assert answers.count(b"HTTP/1.1") == 1
            assert head(answers)[0] == 200
            writer.close()
        reader, writer = await server.connect()
        writer.write(start + b"Content-Length: 99999999\r\n\r\n")
        assert head(await reader.readuntil(b"}"))[0] == 401
        writer.write(b"x" * (protocol._UNREAD_BYTES + 1))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""  # closed without another answer
        writer.close()
    async with asyncio.timeout(PATIENCE), listening(base, head_seconds=0.05) as slow:
        reader, writer = await slow.connect()
        writer.write(start + b"Content-Length: 100\r\n\r\n")
        assert head(await reader.readuntil(b"}"))[0] == 401
        writer.write(b"x")
        assert await reader.read() == b""
        writer.close()


SECOND = b"GET /v1/long HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLED = {
    "both lengths": b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/notes HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n",
    "a negative length": b"POST /v1/notes HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a length with a sign": b"POST /v1/notes HTTP/1.1\r\nHost: x\r\nContent-Length: +0\r\n\r\n",
    "an unknown coding": b"POST /v1/notes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"POST /v1/notes HTTP/1.1\r\nHost: x\r\nContent-Length : 0\r\n\r\n",
    "a bad chunk": b"POST /v1/notes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "no http": b"HELLO\r\n\r\n",
}


@each("base", BOTH)
async def test_a_request_that_could_be_two_is_answered_once_and_the_connection_closed(base: Any) -> None:
    async with listening(base) as server:
        for name, request in SMUGGLED.items():
            answer = await server.say(request + SECOND)
            assert answer.count(b"HTTP/1.1 ") == 1, name
            status, headers, _ = head(answer)
            assert status in (400, 401), name
            assert b"xxxxx" not in answer, name
            if status == 400:
                assert headers["content-type"] == "application/problem+json", name


PATHS = (
    *("/v1/x/../long", "/v1/%2e%2e/v1/long", "//v1/long", "/v1//long", "/v1/long/", "/v1/long%00", "/V1/LONG"),
    *("/v1%2flong", "/v1/long;a=b", "/livez/../v1/long", "/livez/%2e%2e/v1/long", "/v1/./long", "\\v1\\long"),
)


@each("base", BOTH)
async def test_no_spelling_of_a_path_leads_around_the_key(base: Any) -> None:
    async with listening(base) as server:
        for path in PATHS:
            answer = await server.say(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert head(answer)[0] in (400, 401, 404), path
            assert b"xxxxx" not in answer, path


@each("base", BOTH)
async def test_an_offer_of_another_protocol_is_not_taken_and_not_logged(
    base: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(base) as server:
        for offer in ("websocket", "h2c"):
            answer = await server.say(
                f"GET /v1/long HTTP/1.1\r\nHost: x\r\nUpgrade: {offer}\r\nConnection: Upgrade, close\r\n\r\n".encode()
            )
            assert head(answer)[0] == 401
    assert [one for one in caplog.records if one.name.startswith("uvicorn")] == []


@each("base", BOTH)
async def test_a_client_that_takes_nothing_of_an_answer_is_cut_off(base: Any) -> None:
    """Closing alone would wait until it takes the rest."""
    long = b"x" * (16 << 20)  # more than the kernel takes

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(long))]})
        await send({"type": "http.response.body", "body": long})

    async with listening(base, app=app, unread_seconds=0.05) as server:
        for ends in (b"close", b"keep-alive"):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(PATIENCE):
                    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: %s\r\n\r\n" % ends)
                    assert await loop.sock_recv(client, 15) == b"HTTP/1.1 200 OK"
                    while b"flowfabric_http_connections 0.0" not in server.metrics.text(None):
                        await asyncio.sleep(0.01)


async def test_bytes_for_a_client_that_left_meanwhile_are_dropped() -> None:
    class Left(asyncio.Transport):
        def is_closing(self) -> bool:
            return True

        def writelines(self, list_of_data: Any) -> None:
            raise RuntimeError("the handler is closed")

    joined = protocol._Joined(Left(), asyncio.get_running_loop())
    joined.write(b"HTTP/1.1 200 OK\r\n\r\n")
    joined.flush()
    joined.flush()


@each("base", BOTH)
async def test_the_head_of_an_answer_goes_with_the_first_part_of_its_body(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    class Wire:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            sent.append(data)
            self._transport.write(data)

        def writelines(self, pieces: list[bytes]) -> None:
            sent.append(b"".join(pieces))
            self._transport.writelines(pieces)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    joined = protocol._Joined
    monkeypatch.setattr(protocol, "_Joined", lambda transport, loop: joined(Wire(transport), loop))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size = int(scope["path"][1:])
        length = (b"content-length", str(2 * size).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"y" * size})

    async with listening(base, app=app) as server:
        reader, writer = await server.connect()
        async with asyncio.timeout(PATIENCE):
            for size in (1, 0, 500_000):
                sent.clear()
                writer.write(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % size)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(2 * size) == b"x" * size + b"y" * size
                # The first part goes with the head, later ones do not wait for what follows.
                assert sent[0].startswith(b"HTTP/1.1 200")
                assert [sent[0].partition(b"\r\n\r\n")[2], *filter(None, sent[1:])] == (
                    [b"x" * size, b"y" * size] if size else [b""]
                )
            writer.write(b"GET /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"\r\n\r\nxy")
        writer.close()
