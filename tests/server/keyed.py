"""Clients with real API keys, on apps that look them up in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest_asyncio

import flowfabric as ff
from flowfabric.server.app import create_app
from flowfabric.server.keys import ApiKeyCache
from flowfabric.server.operation import Scope
from flowfabric.server.service import Service
from tests.server.leaving import leaving


class Keyed:
    """An app with its own cache of keys, whose clock the test moves, and clients of it."""

    def __init__(self, engine: ff.Engine, stack: AsyncExitStack, **service: Any) -> None:
        self.engine = engine
        self.now = 1000.0
        self.keys = ApiKeyCache(engine, clock=lambda: self.now)
        self.service = Service(engine, keys=self.keys, **service)
        self.app = create_app(engine, service=self.service)
        self._stack = stack

    def with_text(self, key: str | None, *, leaves: bool = False) -> httpx.AsyncClient:
        """A client that shows this key; one that `leaves` takes only the first bytes of an endless answer."""
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(leaving(self.app) if leaves else self.app, raise_app_exceptions=False),
            base_url="http://server",
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )
        self._stack.push_async_callback(client.aclose)
        return client

    async def client(
        self, *scopes: Scope | str, name: str | None = None, leaves: bool = False, **rights: Any
    ) -> httpx.AsyncClient:
        """A client with a new key."""
        count = len((await self.engine.list_api_keys()).items)
        made = await self.engine.create_api_key(name or f"key {count}", scopes or ("admin",), **rights)
        return self.with_text(made.key.reveal(), leaves=leaves)


MakeKeyed = Callable[..., Keyed]


@pytest_asyncio.fixture(name="make_keyed", loop_scope="session")
async def keyed_apps(plain_engine: ff.Engine) -> AsyncIterator[MakeKeyed]:
    """Makes apps, as several processes would have them."""
    async with AsyncExitStack() as stack:
        made: list[Keyed] = []

        def make(**service: Any) -> Keyed:
            made.append(Keyed(plain_engine, stack, **service))
            return made[-1]

        yield make
        for one in made:
            await one.service.close()


@pytest_asyncio.fixture(name="keyed", loop_scope="session")
async def keyed_app(make_keyed: MakeKeyed) -> Keyed:
    """One app."""
    return make_keyed()


def without_instance(answer: httpx.Response) -> tuple[int, dict[str, str], Any]:
    """What a client could compare of two refusals: everything but the ids of the requests."""
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    body = answer.json() if answer.content else None
    if isinstance(body, dict):
        body.pop("instance", None)
    return answer.status_code, headers, body
