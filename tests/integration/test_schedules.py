"""Schedules as an app declares them: which app owns them, and what counts as a change."""

from __future__ import annotations

import os

import pytest

import flowfabric as ff
from flowfabric.worker.schedules import ScheduleDuty, declare
from tests.support import CheckedEngine, Clock


class Salted:
    """A codec that writes the same data differently each time, as encryption does."""

    name = "salted"

    def encode(self, data: bytes) -> bytes:
        return os.urandom(8) + data

    def decode(self, data: bytes) -> bytes:
        return data[8:]


def scheduled(name: str, task: str = "tick", *, app: str = "app", every: str = "1h", salted: bool = False) -> ff.App:
    made = ff.App(name=app, codecs=[Salted()] if salted else [])

    async def handler(n: int) -> None: ...

    made.schedule(made.task(name=task)(handler), 1, name=name, every=every)
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
