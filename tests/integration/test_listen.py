"""Wake-ups: a notification wakes a waiting claim immediately; without one, polling finds the work later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres.listen import Listener
from flowfabric.engine import claims
from flowfabric.values.attempt import Claimed
from tests.support import OTHER, WORKER, Clock, claim_one, started, submit, until_blocked

LONG = timedelta(minutes=10)
PATIENCE = 60.0


@pytest.fixture
async def other(database: str) -> AsyncIterator[ff.Engine]:
    """The engine of another process, as far as the database can tell."""
    async with await ff.Engine.connect(database, notifications=False) as engine:
        yield engine


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting claims look again when woken, or after an hour: what a test sees then is the wake-up."""
    monkeypatch.setattr(claims, "_POLL", 3600.0)


async def asleep(sql: asyncpg.Connection[Any], count: int = 1) -> None:
    """Wait until so many engines have announced that they wait for work, and have looked once more."""
    async with asyncio.timeout(PATIENCE):
        while await sql.fetchval("select count(*) from flowfabric.sleeper where lane <> ''") < count:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


def waiting(engine: ff.Engine, **fields: Any) -> asyncio.Task[Claimed | None]:
    return asyncio.create_task(engine.claim(**{**WORKER, "max_wait": LONG, **fields}))


async def found(task: asyncio.Task[Claimed | None]) -> ff.ExecutionId:
    claimed = await asyncio.wait_for(task, PATIENCE)
    assert claimed is not None
    return claimed.execution_id


@pytest.mark.usefixtures("no_polling")
async def test_a_waiting_claim_is_woken_by_a_create_of_another_process(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    claim = waiting(plain_engine)
    await asleep(sql)
    execution_id = await submit(other)
    assert await found(claim) == execution_id


@pytest.mark.usefixtures("no_polling")
async def test_a_create_inside_a_transaction_of_the_user_wakes_when_it_commits(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    claim = waiting(plain_engine)
    await asleep(sql)
    async with sql.transaction():
        execution_id = await submit(other, connection=sql)
        done, _ = await asyncio.wait([claim], timeout=0.1)
        assert not done
    assert await found(claim) == execution_id


@pytest.mark.usefixtures("no_polling")
async def test_everything_that_makes_work_claimable_wakes_a_waiting_claim(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    execution_id = await submit(other, delay_until=timedelta(seconds=5))
    claim = waiting(plain_engine)
    await asleep(sql)
    await clock.advance(seconds=6)
    assert (await other.run_timers("delay")).handled == 1
    assert await found(claim) == execution_id

    released = (await claim).handle  # type: ignore[union-attr]
    claim = waiting(plain_engine)
    await asleep(sql)
    await other.release(released)
    assert await found(claim) == execution_id

    claim = waiting(plain_engine)
    await asleep(sql)
    await clock.advance(seconds=31)
    assert (await other.run_timers("lease")).handled == 1
    assert await found(claim) == execution_id

    await other.complete((await claim).handle)  # type: ignore[union-attr]
    claim = waiting(plain_engine)
    await asleep(sql)
    await other.replay_execution(execution_id)
    assert await found(claim) == execution_id

    await other.set_lane_state("default", "paused")
    paused = await submit(other)
    claim = waiting(plain_engine)
    await asleep(sql)
    await other.set_lane_state("default", "active")
    assert await found(claim) == paused


@pytest.mark.usefixtures("no_polling")
async def test_each_of_many_waiting_claims_gets_work(
    database: str, plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    async with await ff.Engine.connect(database) as second:
        claims = [waiting(plain_engine) for _ in range(3)] + [waiting(second, **OTHER) for _ in range(3)]
        await asleep(sql, 2)
        made = {await submit(other) for _ in range(6)}
        assert {await found(claim) for claim in claims} == made


@pytest.mark.usefixtures("no_polling")
async def test_a_wake_up_for_work_of_another_lane_lets_the_claim_wait_on(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    claim = waiting(plain_engine)
    await asleep(sql)
    await submit(other, lane_id="elsewhere")
    done, _ = await asyncio.wait([claim], timeout=0.1)
    assert not done
    await asleep(sql)
    execution_id = await submit(other)
    assert await found(claim) == execution_id


async def test_no_notification_is_sent_while_no_process_waits(other: ff.Engine, sql: asyncpg.Connection[Any]) -> None:
    heard: list[object] = []
    await sql.add_listener("flowfabric", lambda *args: heard.append(args[-1]))
    claimed = await started(other)
    await other.complete(claimed.handle)
    await sql.execute("notify flowfabric, 'end'")
    async with asyncio.timeout(PATIENCE):
        while "end" not in heard:
            await asyncio.sleep(0.01)
    assert heard == ["end"]


async def test_a_claim_gives_up_when_its_wait_ends(plain_engine: ff.Engine) -> None:
    begun = time.monotonic()
    assert await plain_engine.claim(**WORKER, max_wait=timedelta(milliseconds=300)) is None
    assert time.monotonic() - begun >= 0.29
    assert await plain_engine.claim(**WORKER, max_wait=timedelta(0)) is None


@pytest.mark.usefixtures("no_polling")
async def test_work_that_appears_unheard_in_the_last_moment_is_found_at_the_end(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    claim = waiting(plain_engine, max_wait=timedelta(seconds=2))
    await asleep(sql)
    await sql.execute("delete from flowfabric.sleeper")  # so that the create notifies no process
    execution_id = await submit(other)
    assert await found(claim) == execution_id


async def test_without_notifications_a_waiting_claim_polls(
    database: str, other: ff.Engine, monkeypatch: pytest.MonkeyPatch, sql: asyncpg.Connection[Any]
) -> None:
    monkeypatch.setattr(claims, "_POLL", 0.02)
    async with await ff.Engine.connect(database, notifications=False, prepared_statements=False) as engine:
        claim = waiting(engine)
        await asyncio.sleep(0.1)
        execution_id = await submit(other)
        assert await found(claim) == execution_id
        assert await engine.claim(**WORKER, max_wait=timedelta(milliseconds=50)) is None
    assert await sql.fetchval("select count(*) from flowfabric.sleeper") == 0, "it announces nothing"


async def test_a_lost_listener_costs_time_and_nothing_else(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_POLL", 3600.0)
    claim = waiting(plain_engine)
    await asleep(sql)
    listeners = "select pid from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
    before = await sql.fetch(listeners)
    assert len(before) == 1
    await sql.execute("select pg_terminate_backend($1, 10000)", before[0]["pid"])
    # No process is notified of this one; the listener wakes all once it is back.
    execution_id = await submit(other)
    assert await found(claim) == execution_id
    claim = waiting(plain_engine)
    await asleep(sql)
    execution_id = await submit(other)
    assert await found(claim) == execution_id
    assert len(await sql.fetch(listeners)) == 1


async def test_one_process_listens_on_one_connection(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    claims = [waiting(plain_engine) for _ in range(5)]
    async with ff.Duties(plain_engine):
        await asleep(sql)
        count = await sql.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
        )
        assert count == 1
        for _ in claims:
            await submit(other)
        for claim in claims:
            await found(claim)


async def test_a_waiting_claim_that_is_cancelled_leaves_the_engine_usable(
    plain_engine: ff.Engine, other: ff.Engine, sql: asyncpg.Connection[Any]
) -> None:
    claim = waiting(plain_engine)
    await asleep(sql)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    execution_id = await submit(other)
    assert (await claim_one(plain_engine)).execution_id == execution_id


async def test_a_listener_that_cannot_connect_tries_again(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = asyncpg.connect, iter([OSError("no route"), asyncpg.TooManyConnectionsError("full")])

    async def connect(*args: Any, **options: Any) -> Any:
        if error := next(refusals, None):
            raise error
        return await real(*args, **options)

    monkeypatch.setattr(asyncpg, "connect", connect)
    listener = Listener(database)
    with listener.topic("work") as woken:
        await asyncio.wait_for(woken.wait(), PATIENCE)
        woken.clear()
        sender = await real(database)
        await sender.execute("notify flowfabric, 'timer'")
        await sender.execute("notify flowfabric, 'work'")
        await asyncio.wait_for(woken.wait(), PATIENCE)
        await sender.close()
    await listener.close()
    await listener.close()


async def test_a_claim_is_never_dated_before_the_work_it_took(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any]
) -> None:
    await submit(plain_engine, lane_id="known")
    holder = await asyncpg.connect(database)
    async with holder.transaction():
        await holder.execute("lock table flowfabric.lane in access exclusive mode")
        claim = asyncio.create_task(plain_engine.claim(**WORKER))
        await until_blocked(sql)
        execution_id = await submit(plain_engine, connection=holder)
    assert await found(claim) == execution_id
    await holder.close()
    execution = await plain_engine.read_execution(execution_id)
    assert execution is not None
    assert execution.started_at is not None
    assert execution.created_at <= execution.started_at
