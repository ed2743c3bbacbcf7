"""Failures of handlers: requested retries, results that do not fit, sealed errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff


class Reversed:
    """A codec that hides text well enough to see where it is not applied."""

    name = "reversed"

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]


@pytest.mark.parametrize("after", [-0.2, timedelta(days=-400), 0, "0s", "no duration", b"1s", float("nan")], ids=str)
async def test_the_failure_is_accepted_whatever_retry_later_asks_for(database: str, after: Any) -> None:
    app = ff.App(database)
    attempts = []

    @app.task(retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(delay=0.01)))
    async def poll(ctx: ff.Context) -> str:
        attempts.append((ctx.retry_count, ctx.reclaim_count))
        if len(attempts) == 1:
            raise ff.RetryLater("not yet", after=after)
        return "done"

    async with ff.Worker(app):
        run = await poll.submit()
        assert await run.result("30s") == "done"
        assert attempts == [(0, 0), (1, 0)]


async def test_a_retry_beyond_all_time_waits_as_long_as_can_be(database: str) -> None:
    app = ff.App(database)

    @app.task
    async def poll() -> None:
        raise ff.RetryLater(after=timedelta(days=365 * 400))

    async with ff.Worker(app) as worker:
        run = await poll.submit()
        while (await run.get()).public_state is not ff.State.DELAYED:
            await worker.idle()
        assert (await run.get()).retry_count == 1


async def test_retry_later_without_a_policy_is_bounded_and_with_one_counts_by_it(database: str) -> None:
    app = ff.App(database)

    @app.task(retry=ff.RetryPolicy(max_retries=2))
    async def poll() -> None:
        raise ff.RetryLater("never", after=0)

    async with ff.Worker(app):
        run = await poll.submit()
        with pytest.raises(ff.TaskFailed) as failed:
            await run.result("30s")
        assert failed.value.category == "retry_later"
        assert len(await run.attempts()) == 3


@pytest.mark.parametrize("returned", ["a text", {1, 2}, object()], ids=lambda value: type(value).__name__)
async def test_a_result_that_does_not_fit_is_not_tried_again(database: str, returned: Any) -> None:
    app = ff.App(database, retry=ff.RetryPolicy(max_retries=5))

    @app.task
    async def count() -> int:
        return returned  # type: ignore[no-any-return]

    async with ff.Worker(app):
        run = await count.submit()
        with pytest.raises(ff.TaskFailed) as failed:
            await run.result("30s")
        assert failed.value.category == "bad_result"
        assert len(await run.attempts()) == 1


async def test_a_codec_that_fails_to_write_ends_the_attempt_and_not_the_worker(database: str) -> None:
    class Broken(Reversed):
        broken = False

        def encode(self, data: bytes) -> bytes:
            if self.broken:
                raise ConnectionError("the key service is away")
            return super().encode(data)

    codec = Broken()
    app = ff.App(database, codecs=[codec])

    @app.task
    async def greet() -> str:
        codec.broken = True
        return "hello"

    async with ff.Worker(app) as worker:
        run = await greet.submit()
        with pytest.raises(ff.TaskFailed) as failed:
            await run.result("30s")
        assert failed.value.category == "ConnectionError"
        assert failed.value.detail == "ConnectionError: its text could not be encoded"
        await worker.idle()
        assert worker.held == {}


async def test_the_words_of_a_step_error_are_sealed_with_everything_else(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    app = ff.App(database, codecs=[Reversed()])
    seen = []

    async def boom() -> None:
        raise ValueError("inner", "TOPSECRET")

    @app.task
    async def careful(ctx: ff.Context) -> str:
        try:
            await ctx.step("boom", boom)
        except ValueError as error:
            seen.append(error.args)
        await ctx.sleep(1)
        return "ok"

    async with ff.Worker(app):
        run = await careful.submit()
        assert await run.result("30s") == "ok"
    assert seen == [("inner", "TOPSECRET")] * 2  # once as it happened, once from memory
    rows = await sql.fetch("select error::text, encode(result, 'escape') as kept from flowfabric.step")
    assert not [row for row in rows if "TOPSECRET" in f"{row['error']}{row['kept']}"]
    assert any("TERCESPOT" in (row["kept"] or "") for row in rows)


async def test_redacting_takes_the_reason_of_a_replay_along(database: str, sql: asyncpg.Connection[Any]) -> None:
    app = ff.App(database)

    @app.task
    async def greet(name: str) -> str:
        return name

    async with ff.Worker(app):
        run = await greet.submit("SECRETNAME")
        await run.result("30s")
        for _ in range(2):
            await run.replay("because SECRETREASON")
            await run.result("30s")
        await (await app.client()).redact(run.execution_id)
    stored = await sql.fetchval(
        "select string_agg(e::text, '') || coalesce((select string_agg(a::text, '') from flowfabric.attempt a), '')"
        " from flowfabric.execution e"
    )
    assert "SECRET" not in stored
