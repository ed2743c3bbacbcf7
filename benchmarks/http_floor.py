"""`python -m benchmarks.http_floor DSN CONNECTIONS FILE`: Starlette routes on a bare table, and a bare broadcast.

What everything over HTTP has to pay: a validated body and an insert, a row read by its key, and the bytes of FILE, sent
to every follower when the database notifies. It prints the port that it listens on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.jobs import uuid7

TABLE = """
create table job (
    id         uuid primary key,
    status     text not null default 'queued',
    kind       text not null,
    payload    bytea not null,
    created_at timestamptz not null default now()
)
"""
CHANNEL = "bare"
_INSERT = "insert into job (id, kind, payload) values ($1, $2, $3)"
_READ = "select id, status, kind, created_at from job where id = $1"


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """The same body that our server gets."""

    execution_kind: str
    arguments: dict[str, Any]


def make_app(dsn: str, connections: int, event: bytes) -> Starlette:
    decode = msgspec.json.Decoder(Submission).decode
    encode = msgspec.json.Encoder().encode
    pool: asyncpg.Pool[Any]
    followers: set[asyncio.Queue[bytes]] = set()

    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        nonlocal pool
        pool = await asyncpg.create_pool(dsn, min_size=connections, max_size=connections)
        listener = await asyncpg.connect(dsn)
        await listener.add_listener(CHANNEL, lambda *_: broadcast())
        yield
        await listener.close()
        await pool.close()

    def broadcast() -> None:
        for one in followers:
            one.put_nowait(event)

    async def submit(request: Request) -> Response:
        given = decode(await request.body())
        made = uuid7()
        async with pool.acquire() as connection:
            await connection.execute(_INSERT, made, given.execution_kind, encode(given.arguments))
        return Response(encode({"status": "created", "execution_id": made}), 201, media_type="application/json")

    async def read(request: Request) -> Response:
        async with pool.acquire() as connection:
            row = await connection.fetchrow(_READ, UUID(request.path_params["id"]))
        if row is None:
            return Response(status_code=404)
        return Response(encode(dict(row)), media_type="application/json")

    async def follow(_: Request) -> Response:
        queue: asyncio.Queue[bytes] = asyncio.Queue(1024)

        async def pieces() -> AsyncIterator[bytes]:
            followers.add(queue)
            try:
                yield b": open\n\n"
                while True:
                    yield await queue.get()
            finally:
                followers.discard(queue)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    routes = [Route("/jobs", submit, methods=["POST"]), Route("/jobs/{id}", read), Route("/events", follow)]
    return Starlette(routes=routes, lifespan=life)


def main() -> None:
    dsn, connections, file = sys.argv[1:]
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    app = make_app(dsn, int(connections), Path(file).read_bytes())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    started = server.startup

    async def startup(sockets: list[socket.socket] | None = None) -> None:
        await started(sockets)
        print(f"serving http://127.0.0.1:{listening.getsockname()[1]}", flush=True)

    server.startup = startup  # type: ignore[method-assign]
    server.run([listening])


if __name__ == "__main__":
    main()
