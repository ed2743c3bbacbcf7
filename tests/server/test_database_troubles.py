"""A database that is away, or stores nothing because it is full or read-only: refused as something to repeat."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import httpx

import flowfabric as ff
from flowfabric.server.app import create_app
from flowfabric.server.service import NoKeys, Service
from tests.each import Rows
from tests.proxy import proxies
from tests.support import submit

FULL = """
create function public.full_disk() returns trigger language plpgsql as $$
begin
    raise exception 'could not extend file "base/5/16384": No space left on device' using errcode = '53100';
end $$;
create trigger full_disk before insert or update on flowfabric.execution
    for each row execute function public.full_disk();
create trigger full_disk before insert or update on flowfabric.operator_audit
    for each row execute function public.full_disk()
"""
EMPTIED = "drop function public.full_disk() cascade"


@asynccontextmanager
async def full(sql: asyncpg.Connection[Any], engine: ff.Engine, database: str) -> AsyncIterator[ff.Engine]:
    await sql.execute(FULL)
    try:
        yield engine
    finally:
        await sql.execute(EMPTIED)


@asynccontextmanager
async def read_only(sql: asyncpg.Connection[Any], engine: ff.Engine, database: str) -> AsyncIterator[ff.Engine]:
    """As a standby is, or a server that an operator made read-only."""
    joint = "&" if "?" in database else "?"
    dsn = f"{database}{joint}options=-c%20default_transaction_read_only%3Don"
    async with await ff.Engine.connect(dsn, reconnect_for=timedelta(0), notifications=False) as refusing:
        yield refusing


@asynccontextmanager
async def client_of(engine: ff.Engine) -> AsyncIterator[httpx.AsyncClient]:
    service = Service(engine, keys=NoKeys())
    transport = httpx.ASGITransport(create_app(engine, service=service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client
    await service.close()


async def test_what_cannot_be_stored_is_refused_with_a_problem_that_says_to_come_back(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], database: str
) -> None:
    target = await submit(plain_engine)
    item = {"execution_kind": "work"}
    changes: dict[str, tuple[str, str, Any]] = {
        "submit": ("POST", "/v1/executions", item),
        "submit a batch": ("POST", "/v1/executions/batch", {"items": [item, item]}),
        "submit a flow": ("POST", "/v1/flows", {"nodes": {"a": item}}),
        "priority": ("PUT", f"/v1/executions/{target}/priority", {"priority": 3}),
        "cancel": ("POST", f"/v1/executions/{target}/cancel", None),
    }
    for trouble in (full, read_only):
        rows = Rows()
        async with trouble(sql, plain_engine, database) as engine, client_of(engine) as client:
            for name, (method, path, body) in changes.items():
                for headers in ({}, {"Idempotency-Key": f"{trouble.__name__} {name}"}):
                    with rows.row((trouble.__name__, name, headers)):
                        refused = await client.request(method, path, json=body, headers=headers)
                        assert refused.status_code == 503, refused.text
                        assert refused.headers["content-type"] == "application/problem+json"
                        assert int(refused.headers["retry-after"]) >= 1
                        problem = refused.json()
                        assert (problem["code"], problem["retryable"]) == ("transport", True)
                        assert "device" not in refused.text and "read-only" not in refused.text  # is in the log
            with rows.row((trouble.__name__, "reads")):
                found = await client.get(f"/v1/executions/{target}")
                assert (found.status_code, found.json()["public_state"]) == (200, "waiting")
                assert (await client.get("/v1/executions")).status_code == 200
                assert (await client.get("/livez")).status_code == 200
        # The same requests, with the same keys, once there is room again: nothing was half done.
        async with client_of(plain_engine) as client:
            for name, (method, path, body) in changes.items():
                with rows.row((trouble.__name__, name, "afterwards")):
                    key = {"Idempotency-Key": f"{trouble.__name__} {name}"}
                    done = await client.request(method, path, json=body, headers=key)
                    assert done.status_code in (200, 201), done.text
        rows.tell()
        target = await submit(plain_engine)
        changes["cancel"] = ("POST", f"/v1/executions/{target}/cancel", None)
        changes["priority"] = ("PUT", f"/v1/executions/{target}/priority", {"priority": 3})


async def test_while_the_database_is_away_every_request_is_refused_as_something_to_repeat(
    plain_engine: ff.Engine, database: str
) -> None:
    target = await submit(plain_engine)
    requests = [
        ("GET", f"/v1/executions/{target}", None),
        ("GET", "/v1/executions", None),
        ("GET", "/v1/events/page", None),
        ("POST", "/v1/executions", {"execution_kind": "work"}),
        ("PUT", f"/v1/executions/{target}/priority", {"priority": 3}),  # in one transaction with its row of the log
        ("POST", f"/v1/executions/{target}/cancel", None),
    ]
    rows = Rows()
    async with (
        proxies(database) as (dsn, (proxy,)),
        await ff.Engine.connect(dsn, reconnect_for=timedelta(0), notifications=False) as engine,
        client_of(engine) as client,
    ):
        await proxy.close()
        for method, path, body in requests:
            for headers in ({}, {"Idempotency-Key": f"{method} {path}"}):
                with rows.row((method, path, headers)):
                    refused = await client.request(method, path, json=body, headers=headers)
                    assert (refused.status_code, refused.json()["code"]) == (503, "transport"), refused.text
                    assert int(refused.headers["retry-after"]) >= 1
        await proxy.open()
        for method, path, body in requests:
            with rows.row((method, path, "afterwards")):
                done = await client.request(method, path, json=body, headers={"Idempotency-Key": f"{method} {path}"})
                assert done.status_code in (200, 201), done.text
    rows.tell()


async def test_requests_whose_connection_the_server_ends_are_refused_as_something_to_repeat(
    plain_engine: ff.Engine, sql: asyncpg.Connection[Any], database: str
) -> None:
    """As after a failover: the connections end while transactions begin, run and commit on them."""
    target = await submit(plain_engine)
    here = "from pg_stat_activity where datname = current_database() and backend_type = 'client backend'"
    kept = await sql.fetchval(f"select array_agg(pid) {here}")  # those of the test itself
    found: Counter[tuple[int, str | None]] = Counter()
    others: list[str] = []
    async with (
        await ff.Engine.connect(database, reconnect_for=timedelta(0), notifications=False) as engine,
        client_of(engine) as client,
    ):
        is_over = asyncio.Event()

        async def change() -> None:
            while not is_over.is_set():
                answer = await client.put(f"/v1/executions/{target}/priority", json={"priority": 3})
                found[answer.status_code, answer.json().get("code")] += 1
                if answer.status_code not in (200, 503):
                    others.append(answer.text)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(change())
            for _ in range(60):
                await asyncio.sleep(0.05)
                await sql.fetch(f"select pg_terminate_backend(pid) {here} and pid <> all ($1)", kept)
            while not found[200, None]:  # on a slow machine all of them were cut off
                await asyncio.sleep(0.05)
            is_over.set()
        assert (await client.put(f"/v1/executions/{target}/priority", json={"priority": 3})).status_code == 200
    assert others == []
    assert found[200, None] and found[503, "transport"], found
