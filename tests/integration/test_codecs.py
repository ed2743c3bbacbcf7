"""Encryption that binds: everything an app stores is sealed for its execution, and nothing else is accepted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

import asyncpg
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import flowfabric as ff
from flowfabric.contracts.codecs import CannotDecode
from tests.integration.test_cli import call

SECRET = "TOPSECRET"
PATIENCE = "60s"


class Sealed:
    binds: Literal[True] = True

    def __init__(self, name: str = "aes") -> None:
        self.name = name
        self._cipher = AESGCM(b"k" * 32)

    def encode(self, data: bytes, execution_id: UUID | None, /) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, data, str(execution_id).encode())

    def decode(self, data: bytes, execution_id: UUID | None, /) -> bytes:
        return self._cipher.decrypt(data[:12], data[12:], str(execution_id).encode())


@pytest.fixture
async def app(database: str) -> AsyncIterator[ff.App]:
    async with ff.App(database, name="sealed", codecs=[Sealed()], accept_plain=False) as made:
        yield made


async def stored(sql: asyncpg.Connection[Any]) -> str:
    """Everything that the database holds, as text; bytes as they are, not as hex."""
    tables = await sql.fetch(
        "select c.relname as name from pg_class c"
        " where c.relnamespace = 'flowfabric'::regnamespace and c.relkind in ('r', 'p')"
    )
    found = []
    for table in tables:
        for row in await sql.fetch(f"select t.* from flowfabric.{table['name']} t"):
            found += [value.decode(errors="replace") if isinstance(value, bytes) else repr(value) for value in row]
    return "\n".join(found)


async def test_nothing_of_what_a_task_handles_is_stored_in_plain(app: ff.App, sql: asyncpg.Connection[Any]) -> None:
    def fails(what: str) -> None:
        raise ValueError(f"cannot do {what}")

    @app.task
    async def child(what: str) -> str:
        return what * 2

    @app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0.01)))
    async def failing(what: str) -> None:
        raise RuntimeError(f"no {what}")

    @app.task
    async def everything(ctx: ff.Context, what: str) -> list[str]:
        await ctx.progress(50, f"half of {what}")
        seen = [await ctx.step("one", lambda: what)]
        with pytest.raises(ValueError, match=SECRET):
            await ctx.step("two", fails, what)
        seen.append(await (await child.submit(what)).result())
        with pytest.raises(ff.TaskFailed, match=SECRET):
            await (await failing.submit(what)).result()
        flow = app.flow("inner")
        flow.add(child, flow.add(child, what, name="first"), name="second")
        seen.append((await (await flow.submit()).result())["second"])
        signal = await ctx.wait_for("answer", payload=str)
        return [*seen, signal.payload]

    async with ff.Worker(app):
        client = await app.client()
        run = await everything.submit(SECRET)
        keyed = await child.submit(SECRET, idempotency_key="k")
        many = await client.submit_many(child, [SECRET, SECRET])
        await _until_waiting(client, run)
        assert (await run.get()).progress_message == f"half of {SECRET}"
        shown = (await call("show", run.execution_id, dsn=app.dsn)).out
        assert "50 % [sealed]" in shown and SECRET not in shown
        await client.signal(run.execution_id, "answer", payload=SECRET)
        assert await run.result(PATIENCE) == [SECRET, SECRET * 2, SECRET * 4, SECRET]
        assert [await one.result(PATIENCE) for one in (keyed, *many)] == [SECRET * 2] * 3
        lost = await failing.submit(SECRET)
        with pytest.raises(ff.TaskFailed, match=f"no {SECRET}") as failed:
            await lost.result(PATIENCE)
        assert f"no {SECRET}" in ((await lost.get()).failure_reason or "")
        assert failed.value.error_type == "RuntimeError"
        assert f"no {SECRET}" in (failed.value.traceback or "")
        assert failed.value.category == "RuntimeError"
        assert await client.engine.audit(events=True) == []
        shown = (await call("show", lost.execution_id, dsn=app.dsn)).out
        assert "[sealed]" in shown and SECRET not in shown
        assert "RuntimeError" in shown, "the category is not sealed: policies are about it"
        assert "[sealed]" in (await call("failures", dsn=app.dsn)).out
    everywhere = await stored(sql)
    assert "[sealed json+aes@] " in everywhere
    assert SECRET not in everywhere


async def _until_waiting(client: ff.AsyncClient, run: ff.Run[Any]) -> None:
    async with asyncio.timeout(60):
        while not await client.waitpoints_of(run.execution_id):
            await asyncio.sleep(0.02)


async def test_data_that_was_moved_to_another_execution_is_refused(app: ff.App, sql: asyncpg.Connection[Any]) -> None:
    @app.task
    async def pay(amount: int) -> int:
        return amount

    large, small = await pay.submit(1_000_000), await pay.submit(1)
    await sql.execute(
        "update flowfabric.execution p set payload = o.payload"
        " from flowfabric.execution o where p.id = $1 and o.id = $2",
        small.execution_id,
        large.execution_id,
    )
    async with ff.Worker(app):
        assert await large.result(PATIENCE) == 1_000_000
        with pytest.raises(ff.TaskFailed) as refused:
            await small.result(PATIENCE)
    assert refused.value.category == "bad_arguments"


async def test_plain_data_is_refused(app: ff.App, database: str) -> None:
    @app.task
    async def pay(amount: int) -> int:
        return amount

    async with ff.App(database, name="plain") as plain, ff.Worker(app):

        @plain.task(name="pay")
        async def unsealed(amount: int) -> int:
            return amount

        run = await unsealed.submit(5)
        with pytest.raises(ff.TaskFailed) as refused:
            await run.result(PATIENCE)
        assert refused.value.category == "bad_arguments"
        assert refused.value.detail == "[sealed]"
        with pytest.raises(ff.TaskFailed, match="not encrypted, and this app accepts nothing else"):
            await (await app.client()).run(run.execution_id).result(PATIENCE)


async def test_the_arguments_of_a_schedule_belong_to_no_execution_and_run(app: ff.App) -> None:
    @app.task
    async def report(what: str) -> str:
        return what

    app.schedule(report, SECRET, name="daily", every=timedelta(days=1))
    async with ff.Worker(app):
        await call("schedules", "run", "daily", dsn=app.dsn)
        client = await app.client()
        found = (await client.find(kind="report")).items
        assert await client.run(found[0].execution_id).result(PATIENCE) == SECRET


async def test_a_result_is_not_read_as_that_of_another(app: ff.App, sql: asyncpg.Connection[Any]) -> None:
    @app.task
    async def echo(what: str) -> str:
        return what

    async with ff.Worker(app):
        one, two = await echo.submit("one"), await echo.submit("two")
        assert await one.result(PATIENCE) == "one" and await two.result(PATIENCE) == "two"
    await sql.execute(
        "update flowfabric.execution p set result = o.result from flowfabric.execution o where p.id = $1 and o.id = $2",
        two.execution_id,
        one.execution_id,
    )
    with pytest.raises(CannotDecode, match="codec 'aes"):
        await (await app.client()).run(two.execution_id).result(PATIENCE)
