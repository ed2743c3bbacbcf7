"""Schedules as an app declares them: which app owns them, and what counts as a change."""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta
from typing import Literal

import pytest

import flowfabric as ff
from flowfabric.values.lease import Operator
from flowfabric.worker.schedules import ScheduleDuty, declare
from tests.integration.test_cli import call
from tests.support import CheckedEngine, Clock


class Salted:
    """A codec that writes the same data differently each time, as encryption does."""

    name = "salted"

    def encode(self, data: bytes) -> bytes:
        return os.urandom(8) + data

    def decode(self, data: bytes) -> bytes:
        return data[8:]


def scheduled(
    name: str,
    task: str = "tick",
    *,
    app: str = "app",
    every: str = "1h",
    salted: bool = False,
    overlap: Literal["skip", "queue", "cancel"] | None = None,
    catch_up: Literal["skip", "one", "all"] = "skip",
) -> ff.App:
    made = ff.App(name=app, codecs=[Salted()] if salted else [])

    async def handler(n: int) -> None: ...

    made.schedule(made.task(name=task)(handler), 1, name=name, every=every, overlap=overlap, catch_up=catch_up)
    return made


async def test_an_app_does_not_take_the_schedule_of_another(engine: CheckedEngine) -> None:
    await declare(engine, scheduled("report", app="first"))
    await engine.pause_schedule("report")

    with pytest.raises(ff.InvalidInput, match="belongs to the app 'first'") as refused:
        await declare(engine, scheduled("report", "other", app="second", every="1m"))

    assert refused.value.field == "name"
    stored = await engine.read_schedule("report")
    assert stored is not None
    assert (stored.kind, stored.paused, stored.timing) == ("tick", True, {"every_ms": 3_600_000})


async def test_another_task_under_the_same_name_is_said(
    engine: CheckedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(engine, scheduled("report"))
    await declare(engine, scheduled("report", "other"))

    stored = await engine.read_schedule("report")
    assert stored is not None
    assert stored.kind == "other"
    assert "submitted tick before and now submits other" in caplog.text


@pytest.mark.parametrize("salted", [False, True])
async def test_declaring_it_again_changes_nothing(engine: CheckedEngine, salted: bool) -> None:
    await declare(engine, scheduled("report", salted=salted))
    before = await engine.read_schedule("report")
    await declare(engine, scheduled("report", salted=salted))

    assert await engine.read_schedule("report") == before


@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "short"])
async def test_a_schedule_of_any_name_that_is_taken_fires(engine: CheckedEngine, clock: Clock, name: str) -> None:
    await declare(engine, scheduled(name))
    await clock.advance(hours=1)

    assert await ScheduleDuty(engine).run_once() == 1
    found = (await engine.find_executions(kinds=["tick"])).items
    assert len(found) == 1


OVERLAPS = {  # how many executions there are, and in which states, after a second time while the first waits
    None: ["waiting", "waiting"],
    "skip": ["waiting"],
    "queue": ["waiting"],
    "cancel": ["cancelled", "waiting"],
}


@pytest.mark.parametrize("overlap", OVERLAPS)
async def test_a_time_at_which_the_last_execution_has_not_ended(
    engine: CheckedEngine, clock: Clock, overlap: Literal["skip", "queue", "cancel"] | None
) -> None:
    await declare(engine, scheduled("report", overlap=overlap))
    duty = ScheduleDuty(engine)
    for _ in range(2):
        await clock.advance(hours=1)
        await duty.run_once()

    found = (await engine.find_executions(kinds=["tick"])).items
    assert sorted(one.public_state.value for one in found) == OVERLAPS[overlap]


@pytest.mark.parametrize(("catch_up", "times"), [("skip", ["01:00", "04:00"]), ("all", ["01:00", "02:00", "03:00"])])
async def test_a_queued_time_is_submitted_when_the_last_execution_has_ended(
    engine: CheckedEngine, clock: Clock, catch_up: Literal["skip", "all"], times: list[str]
) -> None:
    await declare(engine, scheduled("report", overlap="queue", catch_up=catch_up))
    duty = ScheduleDuty(engine)
    began = (await engine.read_schedule("report")).next_at - timedelta(hours=1)  # type: ignore[union-attr,operator]
    for _ in range(4):
        await clock.advance(hours=1)
        await duty.run_once()
    assert await engine.until_next_schedule() is None  # the duty has nothing to wait for

    for _ in range(2):
        live = (await engine.find_executions(kinds=["tick"], states=["waiting"])).items
        await engine.cancel(Operator(live[0].execution_id), "over")
        await duty.run_once()

    found = [await engine.read_execution(one.execution_id) for one in (await engine.find_executions()).items]
    fired = sorted(datetime.fromisoformat(one.tags["schedule.time"]) - began for one in found if one)
    assert [f"0{str(span)[:4]}"[:5] for span in fired] == times


def test_an_unknown_overlap_is_refused() -> None:
    with pytest.raises(ff.InvalidInput, match=r"overlap: got 'stop'; allowed: skip, queue, cancel"):
        scheduled("report", overlap="stop")  # type: ignore[arg-type]  # the refusal under test


async def test_the_list_shows_an_overlap_where_a_schedule_has_one(engine: CheckedEngine, database: str) -> None:
    await declare(engine, scheduled("plain"))
    assert "OVERLAP" not in (await call("schedules", dsn=database)).out
    await declare(engine, scheduled("queued", overlap="queue"))
    assert re.search(r"queued .* skip +queue +active", (await call("schedules", dsn=database)).out)
