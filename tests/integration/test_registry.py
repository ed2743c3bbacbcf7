"""The registry as workers, clients and operators use it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import RegistryEventTrimmer, WorkerRegistryTtlSweep
from flowfabric.client import outcomes
from flowfabric.errors import Conflict
from flowfabric.middleware import MemorySink, Metrics
from flowfabric.values.worker import WorkerRecord
from flowfabric.worker import claims, registration
from tests.integration.test_cli import call
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import Clock, submit
from tests.until import PATIENCE, until

SQL: TypeAlias = "asyncpg.Connection[Any]"
LEASE = timedelta(seconds=30)


def make_app(dsn: str, **options: Any) -> ff.App:
    app = ff.App(dsn, name="shop", **options)

    @app.task(lane="mail")
    async def send(seconds: float = 0) -> int:
        await asyncio.sleep(seconds)
        return 1

    @app.task
    async def block(seconds: float) -> int:
        time.sleep(seconds)  # blocks the loop on purpose
        return 1

    return app


async def alive(engine: ff.Engine) -> list[WorkerRecord]:
    return list((await engine.list_workers("")).items)


async def heartbeats(sql: SQL) -> int:
    found: int = await sql.fetchval("select count(*) from flowfabric.worker_event where event = 'heartbeat'")
    return found


async def events(sql: SQL) -> list[str]:
    return [
        row["event"]
        for row in await sql.fetch("select event from flowfabric.worker_event where event <> 'heartbeat' order by seq")
    ]


async def test_a_worker_is_registered_while_it_runs_and_says_what_it_serves(
    plain_engine: ff.Engine, database: str, sql: SQL
) -> None:
    worker = ff.Worker(make_app(database), concurrency=7, capabilities=["gpu"], worker_id="pool", lease_ttl=LEASE)
    async with worker:
        (found,) = await alive(plain_engine)
        assert (found.worker_id, found.worker_instance_id) == ("pool", worker.instance_id)
        assert (found.lanes, found.capabilities) == (("default", "mail"), ("gpu",))
        assert found.kinds == {"send": (), "block": ()}
        assert (found.slots, found.pid, found.package_version) == (7, os.getpid(), ff.__version__)
        assert found.host
        assert found.liveness_ttl == 2 * LEASE
        leader = await until(plain_engine.list_leaders)
        assert leader[0].worker_instance_id == worker.instance_id
        assert "duties" in (await alive(plain_engine))[0].leads
    assert await alive(plain_engine) == []
    assert await events(sql) == ["registered", "marked_dead"]
    (last, _) = (await plain_engine.list_worker_events(worker.instance_id)).items
    assert last.reason == "stopped"


@pytest.mark.parametrize("duties", [False, True])
async def test_an_idle_worker_sends_its_heartbeats_with_its_announcements(
    plain_engine: ff.Engine, database: str, sql: SQL, monkeypatch: pytest.MonkeyPatch, duties: bool
) -> None:
    alone: list[str] = []
    before = ff.Engine.heartbeat_own

    async def counted(self: ff.Engine, worker: Any) -> Any:
        alone.append(worker.worker_instance_id)
        return await before(self, worker)

    monkeypatch.setattr(ff.Engine, "heartbeat_own", counted)
    monkeypatch.setattr(registration, "_ALONE_FROM", 100.0)
    monkeypatch.setattr(claims, "_LONG_SLEEP", 0.2)
    async with ff.Worker(make_app(database), lease_ttl=1, poll=0.05, duties=duties):
        await until(lambda: _at_least(sql, 3))
    assert alone == []
    assert await alive(plain_engine) == []


async def _at_least(sql: SQL, count: int) -> bool:
    return await heartbeats(sql) >= count


async def test_a_worker_whose_handler_blocks_stays_registered(plain_engine: ff.Engine, database: str, sql: SQL) -> None:
    app = make_app(database)
    async with app, ff.Worker(app, lease_ttl=1, poll=30, concurrency=1):
        run = await app.tasks["block"].submit(3.0)
        assert await run.result() == 1
        told = await run.get()
        meanwhile = await sql.fetchval(
            "select count(*) from flowfabric.worker_event where event = 'heartbeat' and occurred_at between $1 and $2",
            told.started_at,
            told.completed_at,
        )
        assert meanwhile >= 3
        assert len(await alive(plain_engine)) == 1
    assert await events(sql) == ["registered", "marked_dead"]


async def _is_active(run: Any) -> bool:
    return bool(await run.state() is ff.State.ACTIVE)


async def test_a_busy_worker_sends_its_heartbeats_with_its_renewals(
    plain_engine: ff.Engine, database: str, sql: SQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_ALONE_FROM", 100.0)
    app = make_app(database)
    async with app, ff.Worker(app, lease_ttl=1, concurrency=1) as worker:
        run = await app.tasks["send"].submit(60.0)
        await until(lambda: _is_active(run))
        count = await heartbeats(sql)
        await until(lambda: _at_least(sql, count + 2))
        assert len(await alive(plain_engine)) == 1
        await run.cancel()
        worker.grace = 1.0


@pytest.mark.parametrize("how", ["marked dead", "moved clock", "swept"])
async def test_a_worker_that_was_forgotten_registers_again(
    plain_engine: ff.Engine, database: str, sql: SQL, clock: Clock, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowfabric.worker")
    async with ff.Worker(make_app(database), lease_ttl=3, poll=0.2, duties=False) as worker:
        match how:
            case "marked dead":
                await plain_engine.mark_worker_dead(worker.instance_id, reason="a mistake")
            case "moved clock":
                await clock.advance(hours=1)
            case _:
                await clock.advance(hours=1)
                await WorkerRegistryTtlSweep(plain_engine).run_once()
        await until(lambda: _registered_twice(sql))
        assert len(await alive(plain_engine)) == 1
        assert "registered again" in caplog.text
    gone = "marked_dead" if how == "marked dead" else "ttl_swept"
    assert await events(sql) == ["registered", gone, "registered", "marked_dead"]


async def _registered_twice(sql: SQL) -> bool:
    return (await events(sql)).count("registered") == 2


async def test_a_clock_that_is_set_back_forgets_no_worker(
    plain_engine: ff.Engine, database: str, sql: SQL, clock: Clock
) -> None:
    async with ff.Worker(make_app(database), lease_ttl=1, poll=0.2, duties=False):
        await clock.advance(hours=-1)
        count = await heartbeats(sql)
        await until(lambda: _at_least(sql, count + 2))
        assert len(await alive(plain_engine)) == 1
        assert await plain_engine.sweep_workers() == 0
    assert await events(sql) == ["registered", "marked_dead"]


async def test_a_second_worker_with_the_same_instance_id_is_refused(
    plain_engine: ff.Engine, database: str, sql: SQL
) -> None:
    async with ff.Worker(make_app(database), worker_id="w", instance_id="w-1"):
        with pytest.raises(
            Conflict,
            match=r"process \d+ on .* is registered as w-1 .* run `flowfabric workers dead w-1`",
        ):
            await ff.Worker(make_app(database), worker_id="w", instance_id="w-1", concurrency=3).start()
        (found,) = await alive(plain_engine)
        assert found.slots == 100
    assert await events(sql) == ["registered", "marked_dead"]
    async with ff.Worker(make_app(database), worker_id="w", instance_id="w-1"):
        assert len(await alive(plain_engine)) == 1


async def test_a_worker_whose_instance_id_was_taken_stops_and_leaves_the_other_alone(
    plain_engine: ff.Engine, database: str, sql: SQL, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ff.Worker(make_app(database), worker_id="w", instance_id="w-1", lease_ttl=1, duties=False)
    running = asyncio.create_task(worker.run())
    await until(lambda: alive(plain_engine))
    async with sql.transaction():  # its heartbeats find the row locked meanwhile
        await sql.execute("select from flowfabric.registration for update")
        await sql.execute("update flowfabric.registration set process = gen_random_uuid(), liveness_ttl = '1 hour'")
    async with asyncio.timeout(PATIENCE):
        await running
    assert [one.worker_instance_id for one in await alive(plain_engine)] == ["w-1"]


async def test_a_worker_that_crashes_is_swept(plain_engine: ff.Engine, database: str, sql: SQL, clock: Clock) -> None:
    worker = ff.Worker(make_app(database), lease_ttl=LEASE, duties=False)
    async with worker:
        worker.registration.is_abandoned = True
    assert len(await alive(plain_engine)) == 1
    await clock.advance(seconds=59)
    assert await WorkerRegistryTtlSweep(plain_engine).run_once() == 0
    await clock.advance(seconds=1)
    assert await alive(plain_engine) == []
    assert await WorkerRegistryTtlSweep(plain_engine).run_once() == 1
    assert await events(sql) == ["registered", "ttl_swept"]
    await clock.advance(hours=25)
    assert await RegistryEventTrimmer(plain_engine).run_once() == 2


# Metrics of the duties


async def test_the_rounds_of_the_duties_and_who_leads_are_measured(database: str) -> None:
    sink = MemorySink()
    app = make_app(database, middleware=[Metrics(sink)])
    async with app, ff.Worker(app):
        run = await app.tasks["send"].options(delay=0.1).submit()
        assert await run.result() == 1

        async def measured() -> bool:
            return 'flowfabric_duty_items_total{duty="delayed_promotion"}' in sink.snapshot().counts

        await until(measured)
        seen = sink.snapshot()
        assert seen.gauges == {'flowfabric_leads{group="duties"}': 1.0}
        assert seen.timings['flowfabric_duty_seconds{duty="delayed_promotion",outcome="ok"}'].count >= 1
        for duty in ("record_expiry", "grant_sweeper", "usage_dedup_sweeper"):
            assert seen.timings[f'flowfabric_duty_seconds{{duty="{duty}",outcome="ok"}}'].count == 1
        assert not [series for series in seen.timings if "timer_runner" in series]
    assert sink.snapshot().gauges == {'flowfabric_leads{group="duties"}': 0.0}


# Why does nothing happen?


async def test_a_client_that_waits_for_work_without_a_worker_logs_why_once(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outcomes, "_UNSERVED_AFTER", 0.2)
    async with make_app(database) as app:
        runs = [await app.tasks["send"].submit() for _ in range(3)]
        client = await app.client()
        waiting = [asyncio.ensure_future(run.result()) for run in runs]

        async def logged() -> bool:
            return "no live worker serves send in lane mail (no worker is alive)" in caplog.text

        await until(logged)
        waiting.append(asyncio.ensure_future((await app.tasks["send"].submit()).result()))
        await asyncio.sleep(0)
        async with ff.Worker(app):
            assert await asyncio.gather(*waiting) == [1, 1, 1, 1]
        assert client.outcomes._unchecked == {}
    assert caplog.text.count("no live worker serves") == 1
    assert "flowfabric worker" in caplog.text


async def test_a_client_that_waits_for_work_that_is_served_logs_nothing(
    plain_engine: ff.Engine, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outcomes, "_UNSERVED_AFTER", 0.05)
    app = make_app(database)
    async with app, ff.Worker(app):
        await (await app.tasks["send"].submit(0.5)).result()
        await plain_engine.set_lane_state("mail", "paused")
        run = await app.tasks["send"].submit()
        waiting = asyncio.ensure_future(run.result())
        await until(lambda: "lane mail is paused" in caplog.text)
        waiting.cancel()
        await plain_engine.set_lane_state("mail", "active")
    assert [record.message for record in caplog.records if record.name == "flowfabric.client"] == [
        "lane mail is paused; start it with `flowfabric lanes resume mail`"
    ]


async def test_the_command_that_waits_says_why_on_standard_error(
    plain_engine: ff.Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_UNSERVED_AFTER", 0.1)
    target = await submit(plain_engine, execution_kind="send", lane_id="mail")
    said = await call("wait", target, "--timeout", "3s", dsn=database, code=3)
    assert said.err.count("no live worker serves send in lane mail") == 1
    assert said.out == ""


# The commands


async def register(engine: ff.Engine, instance: str, **fields: Any) -> None:
    given: dict[str, Any] = {"lanes": ["default"], "liveness_ttl": timedelta(minutes=1)}
    await engine.register_worker("shop", instance, **given | fields)


async def test_workers_are_listed_in_80_columns(plain_engine: ff.Engine, database: str) -> None:
    assert "no worker is alive" in (await call("workers", dsn=database)).err
    await register(
        plain_engine,
        "shop@a-rather-long-host-name/4711/0123456789ab",
        lanes=["default", "mail", "slow", "images"],
        kinds=["send", "block"],
        slots=100,
    )
    said = (await call("workers", dsn=database)).out.splitlines()
    assert said[0].split() == ["HEARD", "SLOTS", "TASKS", "LEADS", "LANES", "INSTANCE"]
    assert said[1].split()[-6:-1] == ["100", "2", "default,", "images", "+2"]
    assert said[1].index("shop@") <= 50
    await register(plain_engine, "other-1", namespace="tenant")
    found = (await call("workers", "list", "--json", dsn=database)).json["workers"]
    assert [one["worker_instance_id"] for one in found] == ["shop@a-rather-long-host-name/4711/0123456789ab", "other-1"]
    assert "NAMESPACE" in (await call("workers", dsn=database)).out
    only = (await call("workers", "list", "-n", "tenant", "--json", dsn=database)).json["workers"]
    assert [one["worker_instance_id"] for one in only] == ["other-1"]


async def test_a_worker_is_shown_and_removed(plain_engine: ff.Engine, database: str) -> None:
    await register(
        plain_engine, "shop@host/1/aa11", kinds={"send": [1, 2], "block": []}, capabilities=["gpu"], pid=7, host="h"
    )
    await register(plain_engine, "shop@host/2/bb22")
    said = (await call("workers", "show", "aa11", dsn=database)).out
    for words in ("block, send (1, 2)", "gpu", "every namespace", "registered", "shop@host/1/aa11"):
        assert words in said
    shown = (await call("workers", "show", "shop@host/2/bb22", "--json", dsn=database)).json
    assert shown["worker"]["kinds"] is None
    assert [one["event"] for one in shown["events"]] == ["registered"]
    await plain_engine.mark_worker_dead("shop@host/2/bb22", reason="a mistake")
    gone = (await call("workers", "show", "shop@host/2/bb22", dsn=database)).out
    assert gone.startswith("shop@host/2/bb22 is not alive") and "a mistake" in gone
    await register(plain_engine, "shop@host/2/bb22")
    several = await call("workers", "show", "shop", dsn=database, code=2)
    assert "2 workers fit" in several.err
    assert "did you mean" in (await call("workers", "show", "shop@host/1/aa12", dsn=database, code=1)).err
    done = (await call("workers", "dead", "aa11", "--reason", "unplugged", dsn=database)).out
    assert done.strip() == "shop@host/1/aa11 is removed"
    assert [one.worker_instance_id for one in await alive(plain_engine)] == ["shop@host/2/bb22"]
    assert (await plain_engine.list_worker_events("shop@host/1/aa11")).items[0].reason == "unplugged"
    await call("workers", "dead", "aa11", dsn=database, code=1)
    assert "reason:" in (await call("workers", "dead", "bb22", "--reason", "a\nb", dsn=database, code=2)).err


async def test_top_counts_the_workers_and_names_the_leader(plain_engine: ff.Engine, database: str) -> None:
    assert "workers: none is alive" in (await call("top", "--once", "-i", "100ms", dsn=database)).out
    await register(plain_engine, "shop-1", slots=100)
    await plain_engine.take_lead(["duties"], timedelta(seconds=60))
    said = (await call("top", "--once", "-i", "100ms", dsn=database)).out
    assert "workers: 1 with 100 slots; shop-1 leads the duties" in said
    frame = (await call("top", "--once", "-i", "100ms", "--json", dsn=database)).json
    assert (frame["workers"], frame["slots"], frame["leaders"][0]["name"]) == (1, 100, "duties")


async def test_doctor_sees_lanes_that_no_worker_serves_and_mixed_versions(
    plain_engine: ff.Engine, database: str
) -> None:
    async def found() -> tuple[str, str]:
        answer = (await call("doctor", "--json", dsn=database, code=1)).json["findings"]
        return next((one["verdict"], one["detail"]) for one in answer if one["check"] == "workers")

    assert await found() == ("ok", "none is alive")
    await submit(plain_engine, lane_id="mail")
    assert await found() == ("warning", "none is alive; lanes without a worker: mail (1 waiting)")
    await register(plain_engine, "shop-1", lanes=["mail"], slots=5, package_version="1.0")
    assert await found() == ("ok", "1 alive, 5 slots")
    await register(plain_engine, "shop-2", lanes=["mail"], slots=5, package_version="1.1")
    assert await found() == ("warning", "2 alive, 10 slots, of flowfabric 1.0, 1.1")
