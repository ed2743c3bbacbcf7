"""The log lines about a database that goes away, and the pauses of the loops that try again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from flowfabric._duties import duty as duty_module
from flowfabric._duties import lead as lead_module
from flowfabric._duties.duty import Duty
from flowfabric._duties.lead import Leadership
from flowfabric._postgres import outage as outage_module
from flowfabric._postgres.outage import Outage, outage_of
from flowfabric.errors import LeaseLost, TransportError

AWAY = "the database db:5432/shop is away: connection refused; trying again until it is back"
REFUSED = ConnectionRefusedError(111, "Connect call failed ('db', 5432)")
BUSY = TransportError("server_busy", "too many clients")
LOST = TransportError("transport", "connection was closed")
SLOW = TransportError("timeout", "no response in time")
STEPS: list[tuple[float, Any, list[str]]] = [
    # seconds, what happens, what is logged
    (0.0, "found", []),
    (1.0, REFUSED, [AWAY]),
    (1.5, REFUSED, []),
    (60.9, REFUSED, []),
    (61.0, REFUSED, ["the database db:5432/shop has been away for 1 min: connection refused"]),
    (120.0, TimeoutError(), []),
    (121.0, TimeoutError(), ["the database db:5432/shop has been away for 2 min: no response in time"]),
    (200.0, "found", ["the database db:5432/shop is back after 3 min 19 s"]),
    (201.0, "found", []),
    (300.0, FileNotFoundError(2, "No such file"), [AWAY.replace("connection refused", "its socket does not exist")]),
    (322.0, "found", ["the database db:5432/shop is back after 22 s"]),
    (400.0, OSError(113, "No route to host"), [AWAY.replace("connection refused", "No route to host")]),
    (400.3, "found", ["the database db:5432/shop is back after 300 ms"]),
    (500.0, Exception("password authentication failed for user \"app\"\nDETAIL"),
     [AWAY.replace("connection refused", 'password authentication failed for user "app"')]),
    (501.0, Exception("postgresql://app:secret@db/shop"), []),
]  # fmt: skip


def test_a_database_that_goes_away_is_one_line_with_reminders_and_one_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outage = Outage("db:5432/shop")
    for at, event, lines in STEPS:
        monkeypatch.setattr(outage_module.time, "monotonic", lambda at=at: at)
        caplog.clear()
        if isinstance(event, Exception):
            outage.lost(event)
        else:
            outage.found()
        assert [record.getMessage() for record in caplog.records] == lines, (at, event)
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        assert outage.is_on == isinstance(event, Exception)
    assert "secret" not in outage.cause


def test_a_loop_logs_what_the_outage_does_not_say(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("db")
    # error, before an outage, during one
    for error, before, during in (
        (LOST, True, True), (SLOW, True, True), (TimeoutError(), True, True), (BUSY, False, True),
        (LeaseLost(), False, False), (KeyError("x"), False, False),
    ):  # fmt: skip
        assert outage.covers(error) is before, error
        outage.lost(REFUSED)
        assert outage.covers(error) is during, error
        outage.found()
    slow = "the database db does not respond in time; trying again"
    assert [record.getMessage() for record in caplog.records].count(slow) == 1  # a minute long


def test_engines_on_one_address_share_its_outage() -> None:
    one = outage_of("postgresql://a@h/x", "h/x")
    assert outage_of("postgresql://a@h/x", "h/x") is one
    assert outage_of("postgresql://a@h/y", "h/y") is not one


class Away:
    """An engine whose every call fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.outage = Outage("db")

    async def take_lead(self, *_: object) -> None:
        raise self._error


class Failing(Duty):
    async def run_once(self) -> int:
        raise LOST


@pytest.mark.parametrize(
    ("error", "logged"),
    [(LOST, 0), (SLOW, 1), (BUSY, 6)],
    ids=["a lost connection", "a timeout", "any other error"],
)
async def test_loops_that_fail_try_again_with_growing_pauses(
    error: Exception, logged: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = Away(error)
    monkeypatch.setattr(duty_module.random, "uniform", lambda low, high: low)
    duty = Failing(engine)
    monkeypatch.setattr(duty, "run_once", engine.take_lead)
    loops = {duty_module: duty.run, lead_module: Leadership(engine).run}
    for module, run in loops.items():
        stopping = asyncio.Event()
        pauses: list[float] = []

        async def pause(seconds: float, stop: asyncio.Event, *_: object, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)
            if len(pauses) == 6:
                stop.set()

        monkeypatch.setattr(module, "first_of", pause)
        caplog.clear()
        engine.outage = Outage("db")
        await run(stopping)
        assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
        assert len(caplog.records) == logged
