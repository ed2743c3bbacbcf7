"""Clients of the server's app, in the test's process: no socket between them, a real database behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric.server.app import create_app
from flowfabric.server.call import Caller
from flowfabric.server.operation import Scope
from flowfabric.server.service import Service
from tests.kept import (  # noqa: F401 - fixtures
    Kept,
    kept_clock,
    kept_database,
    kept_engine,
    kept_plain_engine,
    kept_sql,
    kept_state,
)
from tests.server.following import Follow, Following
from tests.server.keyed import keyed_app, keyed_apps  # noqa: F401 - fixtures

MakeClient = Callable[..., httpx.AsyncClient]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All asynchronous tests of this folder run in one event loop."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("asyncio"):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


class TableOfKeys:
    """Keys of a test, by their text."""

    def __init__(self) -> None:
        self.callers: dict[str, Caller] = {}

    async def caller(self, key: str, address: str) -> Caller | None:
        return self.callers.get(key)


@pytest_asyncio.fixture(loop_scope="session")
async def service(plain_engine: ff.Engine) -> AsyncIterator[Service]:
    """What all requests share."""
    made = Service(plain_engine, keys=TableOfKeys())
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def client_of(plain_engine: ff.Engine, service: Service) -> AsyncIterator[MakeClient]:
    """Makes a client whose key has the scopes and namespaces given; without scopes one that shows no key."""
    app = create_app(plain_engine, service=service)
    async with AsyncExitStack() as stack:

        def make(
            *scopes: Scope,
            namespaces: tuple[str, ...] | None = None,
            hides_payloads: bool = False,
            name: str = "tester",
        ) -> httpx.AsyncClient:
            headers = {}
            if scopes:
                assert isinstance(service.keys, TableOfKeys)
                key = f"ffk_{len(service.keys.callers)}_secret"
                service.keys.callers[key] = Caller(
                    name=name,
                    key_id=key.split("_")[1],
                    scopes=frozenset(scopes),
                    namespaces=namespaces,
                    hides_payloads=hides_payloads,
                )
                headers["Authorization"] = f"Bearer {key}"
            client = httpx.AsyncClient(
                transport=httpx.ASGITransport(app, raise_app_exceptions=False),
                base_url="http://server",
                headers=headers,
            )
            stack.push_async_callback(client.aclose)
            return client

        yield make


@pytest.fixture
def client(client_of: MakeClient) -> httpx.AsyncClient:
    """A client that may do everything."""
    return client_of(Scope.ADMIN)


Submit = Callable[..., Awaitable[str]]


@pytest.fixture
def submit(client: httpx.AsyncClient) -> Submit:
    """Submits an execution; returns its id."""

    async def do(kind: str = "work", **members: object) -> str:
        answer = await client.post("/v1/executions", json={"execution_kind": kind, **members})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["execution_id"])

    return do


@pytest.fixture
def follow(client: httpx.AsyncClient) -> Follow:
    """Follows a path with the key of a client, by default of one that may do everything."""

    def do(path: str = "/v1/events", *, by: httpx.AsyncClient = client, **params: Any) -> Following:
        return Following(by._transport.app, path, key=by.headers.get("authorization", ""), **params)  # type: ignore[attr-defined]

    return do
