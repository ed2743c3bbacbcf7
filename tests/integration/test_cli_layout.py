"""Every list on a terminal of 80 columns: nothing wraps, and what is left out can be had."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from rich.cells import cell_len

import flowfabric as ff
from flowfabric.cli import _output
from flowfabric.cli._layout import lay_out
from flowfabric.cli._output import Column
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.wait import Fresh
from tests.integration.test_cli import call, on_a_terminal
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import Clock, claim_one, submit

WIDTH = 80
KIND = "app.billing.invoices.classify_the_documents_of_a_supplier"
LANE = "invoices-of-the-eu-region-with-a-name-as-long-as-lanes-may-have"
NAMESPACE = "tenants/the-very-long-name-of-a-customer-ltd-and-sons"
WIDE = "請求書を分類する仕事の長い名前です"
FAILURE = "ValueError: the supplier 4711 has sent a document that no classifier of this deployment has ever seen"
# Each list, and the columns that it must have at any width.
LISTS: dict[tuple[str, ...], set[str]] = {
    ("ls",): {"ID", "STATE", "KIND", "CREATED"},
    ("ls", "--state", "failed"): {"ID", "STATE", "KIND", "CREATED"},
    ("waits",): {"ID", "TASK", "KEY", "DEADLINE", "THEN"},
    ("schedules",): {"NAME", "TIMING", "STATE", "NEXT"},
    ("failures",): {"ID", "STATE", "KIND", "FAILURE"},
    ("failures", "--summary"): {"COUNT", "KIND", "STATE", "FAILURE", "EXAMPLE"},
    ("workers",): {"HEARD", "LANES", "INSTANCE"},
    ("flow",): {"ID", "STATE", "NODES", "AGE", "NAME"},
    ("lanes",): {"LANE", "STATE", "READY", "OLDEST", "DELAYED", "RUNNING"},
    ("keys",): {"KEY", "STATE"},
}


async def begun(engine: ff.Engine, *, lane_id: str, **fields: Any) -> Claimed:
    await submit(engine, lane_id=lane_id, **fields)
    return await claim_one(engine, lane_id=lane_id, lease_ttl=timedelta(days=1))


async def fill(engine: ff.Engine, clock: Clock) -> dict[str, list[ff.ExecutionId]]:
    """Executions in many states, with long names, of today and of days before."""
    long: dict[str, Any] = {"execution_kind": KIND, "lane_id": LANE, "namespace": NAMESPACE}
    found: dict[str, list[ff.ExecutionId]] = {"waiting": [await submit(engine, **long, priority=9000)]}
    await clock.advance(days=3)
    failed = await begun(engine, **{**long, "lane_id": LANE[:-1]})
    await engine.fail(failed.handle, FAILURE, failure_class="permanent")
    found["failed"] = [failed.execution_id]
    done = await begun(engine, execution_kind=WIDE, lane_id="wide")
    await clock.advance(hours=2, minutes=3)
    await engine.complete(done.handle, b"1")
    found["completed"] = [done.execution_id]
    cancelled = await submit(engine)
    await engine.cancel(Operator(cancelled), "no")
    found["cancelled"] = [cancelled]
    waiting = await begun(engine, execution_kind=KIND, lane_id="approvals")
    await engine.suspend(
        waiting.handle,
        waitpoints=[Fresh(mint_uuid(), "approval-of-the-head-of-accounting")],
        resume_condition=on("approval-of-the-head-of-accounting", "approved-by-the-head"),
        reason_code="waiting_for_approval",
        timeout_at=await clock.now() + timedelta(days=400),
        timeout_behavior="escalate",
    )
    found["suspended"] = [waiting.execution_id]
    running = await begun(engine, execution_kind=KIND, lane_id="running")
    found["active"] = [running.execution_id]
    await submit(engine, lane_id="later", delay_until=timedelta(days=1))
    for name, timing in (
        (
            "the nightly report of all the invoices of the day before",
            {"cron": "15 3 * * 1-5", "timezone": "Europe/Berlin"},
        ),
        ("weekly", {"every_ms": 604_800_000}),
    ):
        await engine.put_schedule(name, kind=KIND, timing=timing, next_at=await clock.now())
    for number in range(2):
        await engine.register_worker(
            f"billing@worker-{number}.eu-central-1.compute.internal.example",
            f"billing@worker-{number}.eu-central-1.compute.internal.example/12345/{mint_uuid().hex[-12:]}",
            lanes=[LANE, "approvals", "running"], kinds=[KIND], liveness_ttl=timedelta(hours=1), slots=100,
        )  # fmt: skip
    nodes = [NewNode(name=f"n{n}", execution=NewExecution(execution_kind=KIND)) for n in range(3)]
    await engine.submit_flow(nodes, flow_kind=KIND, namespace=NAMESPACE)
    return found


def wide_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(_output, "terminal_width", lambda: width)


async def test_every_list_fits_80_columns_and_says_what_it_leaves_out(
    plain_engine: ff.Engine, clock: Clock, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await fill(plain_engine, clock)
    for width in (WIDTH, 100):
        wide_terminal(monkeypatch, width)
        for arguments, columns in LISTS.items():
            said = await call(*arguments, dsn=database)
            header, *lines = said.out.splitlines()
            about = f"{arguments} at {width}:\n{said.out}{said.err}"
            assert all(cell_len(line) <= width for line in said.out.splitlines()), about
            assert columns <= set(header.split()), about
            # One line for each item: as many as a pipe gets.
            monkeypatch.setattr(_output, "terminal_width", lambda: None)
            piped = (await call(*arguments, dsn=database)).out.splitlines()
            wide_terminal(monkeypatch, width)
            assert len(lines) == len(piped) - 1, about
            left_out = {
                name.rstrip(";")
                for name in said.err.partition("without ")[2].partition("; --wide")[0].split(", ")
                if name
            }
            assert set(piped[0].split()) - {"CATCH", "UP"} <= set(header.split()) | left_out | {"WAITING_CHILDREN"}, (
                about
            )
            if arguments != ("keys",):
                # The names alone: a column is as wide as its ages, and these grow between two calls.
                wide = (await call(*arguments, "--wide", dsn=database)).out.splitlines()
                assert wide[0].split() == piped[0].split()
        shown = (await call("ls", dsn=database)).out
        for state, ids in found.items():
            for one in ids:
                (line,) = [line for line in shown.splitlines() if line.startswith(one.hex[-8:])]
                assert line.split()[1] == state
                assert (await call("show", line.split()[0], "--json", dsn=database)).json["execution"][
                    "execution_id"
                ] == str(one)
        top = (await call("top", "--once", "--interval", "100ms", dsn=database)).out
        assert all(cell_len(line) <= width for line in top.splitlines()[3:]), top
        for title in ("Lanes", "Workers", "Running", "Waiting for signals", "Flows that have not ended", "Failed"):
            assert f"\n{title}" in top, top
        for one in found["active"]:
            assert f"{one.hex[-8:]}  " in top
            assert str(one) not in top, "every table of it has short ids"
        assert "cron 15 3 * * 1-5, Europe/Berlin " in (await call("schedules", dsn=database)).out
        assert "every 7 d " in (await call("schedules", dsn=database)).out


async def test_a_wide_terminal_shows_whole_ids(plain_engine: ff.Engine, database: str) -> None:
    execution_id = await submit(plain_engine)
    await plain_engine.cancel(Operator(execution_id), "no")
    for columns in (40, 80, 200):
        code, seen = on_a_terminal("ls", "--dsn", database, columns=columns)
        assert code == 0, seen
        assert (str(execution_id) in seen) == (columns == 200)
        assert execution_id.hex[-8:] in seen
        assert "\x1b[33mcancelled" in seen
    code, seen = on_a_terminal("ls", "--wide", "--dsn", database, columns=80)
    assert str(execution_id) in seen


# The layout itself


IDS = [UUID(int=n << 64 | n) for n in (1, 2, 1 << 33)]


@pytest.mark.parametrize("seed", range(3))
def test_any_table_fits_where_its_columns_may_be_cut(seed: int) -> None:
    rng = random.Random(seed)
    columns = [
        Column("ID"), Column("STATE"), Column("NAME", cut=6), Column("WHEN", drop=2), Column("LANE", cut=5, drop=1),
        Column("INSTANCE", cut=8, ends=True, drop=3), Column("WHY", cut=8),
    ]  # fmt: skip
    letters = "abc é請\u0301"
    for _ in range(100):
        rows = [
            [
                mint_uuid(), rng.choice(("waiting", "completed")), "".join(rng.choices(letters, k=rng.randrange(40))),
                datetime.now(UTC) - timedelta(days=rng.choice((0, 0, 9, 900))), "lane" * rng.randrange(9),
                "host/" + "x" * rng.randrange(40), "".join(rng.choices(letters, k=rng.randrange(90))),
            ]
            for _ in range(rng.randrange(5))
        ]  # fmt: skip
        for width in (44, 60, 80, 120, 300):
            laid = lay_out(columns, rows, width)
            assert laid.fits
            assert sum(laid.widths) + 2 * (len(laid.widths) - 1) <= width
            for row in (laid.headers, *laid.cells):
                assert all(cell_len(cell) <= size for cell, size in zip(row, laid.widths, strict=True)), (row, laid)
            assert set(laid.headers) | set(laid.left_out) == {one.name for one in columns}


def test_ids_that_end_alike_get_as_many_digits_as_tell_them_apart() -> None:
    def shown(ids: list[UUID]) -> list[str]:
        return [row[0] for row in lay_out(["ID", Column("X", cut=1)], [[one, "x" * 90] for one in ids], 50).cells]

    one = UUID("01993c5a-1111-7abc-8def-0123456789ab")
    assert shown([one]) == ["456789ab"]
    assert shown([one, UUID("01993c5a-1111-7abc-8def-ff23456789ab")]) == ["0123456789ab", "ff23456789ab"]
    assert shown([one, one]) == ["456789ab"] * 2


def test_times_say_the_day_where_they_are_not_of_today() -> None:
    now = datetime.now().astimezone().replace(microsecond=0)

    def shown(*times: datetime) -> list[str]:
        return [row[0] for row in lay_out(["T", Column("X", cut=1)], [[one, "x" * 90] for one in times], 30).cells]

    assert shown(now) == [f"{now:%H:%M:%S}"]
    earlier, old = now - timedelta(days=5), now - timedelta(days=900)
    assert shown(now, earlier) == [f"{now:%m-%d %H:%M}", f"{earlier:%m-%d %H:%M}"]
    assert shown(now, old) == [f"{now:%Y-%m-%d}", f"{old:%Y-%m-%d}"]


# Views that refresh


async def test_ls_can_be_watched(plain_engine: ff.Engine, database: str) -> None:
    first = await submit(plain_engine)
    import pty

    from tests.integration.test_cli import PROGRAM

    pid, terminal = pty.fork()
    if pid == 0:
        arguments = [PROGRAM, "ls", "--watch", "-i", "100ms", "--dsn", database]
        os.execve(PROGRAM, arguments, {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"})
    seen = b""
    deadline = time.monotonic() + 30

    async def until(word: str) -> None:
        nonlocal seen
        while word.encode() not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(terminal, 65536)

    await until(first.hex[-8:])
    second = await submit(plain_engine)
    await until(second.hex[-8:])
    os.kill(pid, signal.SIGINT)
    try:
        while part := os.read(terminal, 65536):
            seen += part
    except OSError:
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert (await call("ls", "--watch", "--all", dsn=database, code=2)).err == (
        "flowfabric: --watch: given with --all, --quiet or --cursor; allowed: without them\n"
    )
