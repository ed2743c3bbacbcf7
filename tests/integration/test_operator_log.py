"""The worker's log, as an operator reads it: whole lines."""

from __future__ import annotations

import asyncio
import logging
import re
from datetime import timedelta

import pytest

import flowfabric as ff
from flowfabric._postgres.outage import Outage
from tests.proxy import proxies
from tests.support import Clock
from tests.until import until

PATIENCE = 60.0
LINES = {
    "works": ["DEBUG works ID: started, attempt 1", "DEBUG works ID: succeeded after N s, attempt 1"],
    "flaky": [
        "DEBUG flaky ID: started, attempt 1",
        "WARNING flaky ID: failed, retry 1 of 2 in N s: ValueError: not yet",
        "DEBUG flaky ID: started, attempt 2",
        "WARNING flaky ID: failed, retry 2 of 2 in N s: ValueError: not yet",
        "DEBUG flaky ID: started, attempt 3",
        "ERROR flaky ID: failed for good after 3 attempts: ValueError: not yet",
    ],
    "hopeless": ["DEBUG hopeless ID: started, attempt 1", "ERROR hopeless ID: failed for good: no such order"],
    "sleeps": [
        "DEBUG sleeps ID: started, attempt 1",
        "DEBUG sleeps ID: waits without a worker",
        "DEBUG sleeps ID: continued, attempt 1",
        "DEBUG sleeps ID: succeeded after N s, attempt 1",
    ],
    "cancelled": [
        "DEBUG cancelled ID: started, attempt 1",
        "INFO cancelled ID: it was cancelled; its handler stops",
    ],
    "slow": ["DEBUG slow ID: started, attempt 1", "INFO slow ID: its attempt timed out; its handler stops"],
    "retried": [
        "DEBUG retried ID: started, attempt 1",
        "INFO retried ID: its attempt timed out; its handler stops",
        "DEBUG retried ID: started, attempt 2",
        "DEBUG retried ID: succeeded after N s, attempt 2",
    ],
    "left": [
        "INFO left ID: taken over from a worker that stopped responding, attempt 2",
        "DEBUG left ID: succeeded after N s, attempt 2",
    ],
}


def lines_about(kind: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if getattr(record, "kind", None) == kind]
    words = [f"{record.levelname} {record.getMessage()}" for record in found]
    words = [re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", line) for line in words]
    return [re.sub(r"\d+(\.\d+)? m?s\b", "N s", line) for line in words]


async def test_each_start_and_end_of_an_execution_is_one_line_in_words(
    database: str, plain_engine: ff.Engine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "flowfabric.worker")
    app = ff.App(database)
    begun = asyncio.Event()

    @app.task
    async def works() -> int:
        return 1

    @app.task(retry=ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(0.01)))
    async def flaky() -> None:
        raise ValueError("not yet")

    @app.task
    async def hopeless() -> None:
        raise ff.Reject("no such order")

    @app.task
    async def sleeps(ctx: ff.Context) -> None:
        await ctx.sleep(1)

    @app.task
    async def cancelled() -> None:
        begun.set()
        await asyncio.Event().wait()

    @app.task(attempt_timeout=1)
    async def slow() -> None:
        await asyncio.Event().wait()

    @app.task(attempt_timeout=1, retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(3)))
    async def retried(ctx: ff.Context) -> None:
        if ctx.attempt_index == 0:
            await asyncio.Event().wait()

    @app.task(lane="left")
    async def left() -> int:
        return 2

    runs = {"left": await left.submit()}
    await plain_engine.claim("left", worker_id="gone", worker_instance_id="gone", lease_ttl=timedelta(seconds=1))
    await clock.advance(seconds=2)
    async with ff.Worker(app, grace=1, lease_ttl=3):
        for name, task in app.tasks.items():
            if name != "left":
                runs[name] = await task.submit()
        await asyncio.wait_for(begun.wait(), PATIENCE)
        await runs["cancelled"].cancel()
        for name in LINES:
            await until(lambda name=name: len(lines_about(name, caplog)) >= len(LINES[name]))
    await app.close()
    found = {name: lines_about(name, caplog) for name in LINES}
    # The worker notices that an attempt timed out before the next one begins, but may write the lines in any order.
    assert sorted(found.pop("retried")) == sorted(LINES["retried"])
    assert found == {name: lines for name, lines in LINES.items() if name != "retried"}


async def test_a_worker_says_once_that_its_database_is_away_and_once_that_it_is_back(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowfabric")
    refused = 0
    lost = Outage.lost

    def counted(self: Outage, error: BaseException) -> None:
        nonlocal refused
        refused += 1
        lost(self, error)

    monkeypatch.setattr(Outage, "lost", counted)
    begun = asyncio.Event()
    async with proxies(database) as (dsn, (proxy,)):
        app = ff.App(dsn)

        @app.task
        async def job(ctx: ff.Context, seconds: float = 0) -> str:
            begun.set()
            await asyncio.sleep(seconds)
            return await ctx.step("say", str, "done")

        @app.task
        async def waits() -> str:
            return await (await job.submit(0.3)).result()

        async with ff.Worker(app, grace=1, lease_ttl=30, poll=0.1):
            run = await waits.submit()
            await asyncio.wait_for(begun.wait(), PATIENCE)
            caplog.clear()
            await proxy.close()
            await until(lambda: refused >= 15)  # the claims, the leader, the listeners, the results
            said = [record.getMessage() for record in caplog.records]
            target = f"127.0.0.1:{proxy.port}/{dsn.rpartition('/')[2]}"
            (line,) = said
            away = rf"the database {re.escape(target)} is away: connection \w.*; trying again until it is back"
            assert re.fullmatch(away, line)
            await proxy.open()
            assert await run.result(PATIENCE) == "done"
            assert await (await job.submit()).result(PATIENCE) == "done"
            said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            # Where a machine is slow, the lease may have been lost meanwhile: that is another line.
            said = [line for line in said if line.startswith("the database ")]
            assert len(said) == 2, said
            assert re.fullmatch(rf"the database {re.escape(target)} is back after \d+ m?s", said[1])
        await app.close()
