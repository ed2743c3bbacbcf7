"""API keys and bulk jobs with real servers: two processes that share nothing but the database."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

import flowfabric as ff
from flowfabric.values.execution import NewExecution
from flowfabric.values.state import State
from tests.acceptance.test_server_process import PATIENCE, Site, site  # noqa: F401 - a fixture

pytestmark = [pytest.mark.xdist_group("server process")]
COUNT = 3000
SLACK = 10.0  # seconds, for a machine that other work uses; `server/test_keys.py` adds up the bounds themselves


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := await condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


async def test_a_bulk_job_continues_when_its_server_is_killed(site: Site) -> None:  # noqa: F811
    async with await ff.Engine.connect(site.dsn) as engine:
        for _ in range(COUNT // 1000):
            await engine.create_many([NewExecution(execution_kind="k")] * 1000)
        key = await engine.create_api_key("alice", ["operate", "read"])
        first = site.start("--auth=keys", "--duties")
        clients = [
            httpx.AsyncClient(
                base_url=await server.ready(), headers={"Authorization": f"Bearer {key.key.reveal()}"}, timeout=PATIENCE
            )
            for server in (first, site.start("--auth=keys", "--no-duties"))
        ]
        begun = await clients[1].post("/v1/bulk/cancel", json={"filter": {"kinds": ["k"]}, "reason": "enough"})
        assert begun.status_code == 202, begun.text
        where = begun.headers["location"]

        async def job() -> dict[str, Any]:
            found: dict[str, Any] = (await clients[1].get(where)).json()
            return found

        async def has_begun() -> bool:
            return bool((await job())["changed"])

        await until(has_begun)
        first.process.send_signal(signal.SIGKILL)
        await first.ended()
        before = await job()
        assert before["state"] in ("running", "done")

        async def done() -> dict[str, Any] | None:
            found = await job()
            return found if found["state"] == "done" else None

        third = site.start("--auth=keys", "--duties")
        await third.ready()
        found = await until(done)
        # No chunk was lost, and none was run twice.
        assert (found["changed"], found["unchanged"], found["refused"]) == (COUNT, 0, 0)
        left = await engine.find_executions(kinds=["k"], states=[one for one in State if one is not State.CANCELLED])
        assert left.items == [] and left.next_cursor is None
        for client in clients:
            await client.aclose()


async def test_a_revoked_key_stops_on_every_server_and_its_streams_end(
    site: Site,  # noqa: F811
) -> None:
    servers = [site.start("--auth=keys", "--no-duties") for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(await ff.Engine.connect(site.dsn))
        key = await engine.create_api_key("alice", ["read"])
        headers = {"Authorization": f"Bearer {key.key.reveal()}"}
        clients, streams = [], []
        for server in servers:
            client = httpx.AsyncClient(base_url=await server.ready(), headers=headers, timeout=PATIENCE)
            clients.append(await stack.enter_async_context(client))
            stream = await stack.enter_async_context(client.stream("GET", "/v1/events"))
            assert stream.status_code == 200
            streams.append(stream.aiter_text())
            await anext(streams[-1])
        for client in clients:  # which the server remembers
            assert (await client.get("/v1/executions")).status_code == 200

        async def refused(client: httpx.AsyncClient) -> None:
            while (answer := await client.get("/v1/executions")).status_code == 200:
                await asyncio.sleep(0.05)
            assert answer.status_code == 401, answer.text

        async def ended(stream: AsyncIterator[str]) -> None:
            async for piece in stream:
                assert "bye" not in piece  # the server does not stop

        await engine.revoke_api_key(key.key_id)
        async with asyncio.timeout(5 + SLACK):
            await asyncio.gather(*map(refused, clients), *map(ended, streams))
        for server in servers:
            assert server.process.poll() is None
