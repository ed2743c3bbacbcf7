"""`flowfabric events`, `consumers` and `fork`, and what `doctor` says about consumers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.conditions import on
from flowfabric.values.event import EventCursor
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.step import NewStep
from flowfabric.values.wait import Fresh
from tests.each import each
from tests.integration.test_cli import call
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import Clock, end_one, started, submit_member


async def test_events_are_printed_by_family_and_filter(plain_engine: ff.Engine, database: str) -> None:
    engine = plain_engine
    first = await end_one(engine, namespace="acme", tags={"t": "x"}, execution_kind="bill")
    second = await end_one(engine, execution_kind="ship")
    flow = FlowId(mint_uuid())
    member = await submit_member(engine, flow)
    await engine.cancel(Operator(member), "no")
    said = await call("events", dsn=database)
    assert [line.split("  ")[1].strip() for line in said.out.splitlines()] == [
        "lease acquired", "success", "lease acquired", "success", "cancelled",
    ]  # fmt: skip
    assert str(first) in said.out
    assert "continue with --after" in said.err
    for options, found in (
        (["--family", "completion"], [first, second, member]),
        (["--family", "completion", "--namespace", "acme"], [first]),
        (["--family", "completion", "--tag", "t=x"], [first]),
        (["--family", "completion", "--kind", "ship"], [second]),
        (["--family", "completion", "--flow", str(flow)], [member]),
        (["--family", "completion", "--execution", str(second)], [second]),
        (["--family", "operator", "--family", "signal"], []),
    ):
        said = await call("events", *options, "--json", dsn=database)
        assert [json.loads(line)["execution_id"] for line in said.out.splitlines()] == [str(one) for one in found]


async def test_events_of_limits_name_them(plain_engine: ff.Engine, database: str) -> None:
    made = await plain_engine.create_budget(
        name="monthly", dimensions=["tokens"], hard_limits=[10], soft_limits=[0], reset_interval=timedelta(0)
    )
    await plain_engine.update_budget(made.budget_id, raise_by={"tokens": 5})
    said = await call("events", "--family", "operator", dsn=database)
    assert said.out.split()[2:] == ["budget_changed", "monthly"]


async def test_events_of_signals_and_workers_say_what_they_are(plain_engine: ff.Engine, database: str) -> None:
    held = await started(plain_engine)
    await plain_engine.suspend(held.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    for _ in range(2):
        await plain_engine.signal_execution(
            held.execution_id, "k", signal_name="s", signal_category="c", source_type="user", idempotency_key="once"
        )
    await plain_engine.register_worker("pool", "w-1", lanes=["default"], liveness_ttl=timedelta(seconds=10))
    said = await call("events", "--family", "signal", "--family", "worker", dsn=database)
    assert [[part.strip() for part in line.split("  ") if part.strip()][1:] for line in said.out.splitlines()] == [
        ["signal", str(held.execution_id), "test", "resumed it"],
        ["signal", str(held.execution_id), "test", "repeated"],
        ["worker registered", "w-1"],
    ]


async def test_events_continue_after_a_cursor_and_begin_at_a_time(
    plain_engine: ff.Engine, database: str, clock: Clock
) -> None:
    await end_one(plain_engine)
    lines = [json.loads(line) for line in (await call("events", "--json", dsn=database)).out.splitlines()]
    assert [line["families"] for line in lines] == [["lease"], ["lease", "completion"]]
    said = await call("events", "--after", lines[0]["cursor"], "--json", dsn=database)
    assert [json.loads(line)["cursor"] for line in said.out.splitlines()] == [lines[1]["cursor"]]
    await clock.advance(hours=1)
    assert (await call("events", dsn=database)).out == ""
    assert len((await call("events", "--since", "1d", dsn=database)).out.splitlines()) == 2
    assert len((await call("events", "--after", "0", dsn=database)).out.splitlines()) == 2


async def test_events_are_followed_as_they_come(plain_engine: ff.Engine, database: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m", "flowfabric.cli", "events", "--follow", "--family", "completion", "--json", "--dsn", database,
        "--after", str((await plain_engine.count_events()).cursor),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for _ in range(2):
            made = await end_one(plain_engine)
            async with asyncio.timeout(60):
                line = json.loads(await process.stdout.readline())
            assert line["execution_id"] == str(made)
    finally:
        process.kill()
        await process.wait()


async def test_following_that_is_interrupted_says_where_to_continue(plain_engine: ff.Engine, database: str) -> None:
    await end_one(plain_engine)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m", "flowfabric.cli", "events", "--follow", "--family", "completion", "--after", "0", "--dsn", database,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert b"success" in await process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, said = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    cursor = (await plain_engine.count_events()).cursor
    assert said.decode().splitlines()[:1] == [f"1 event; continue with --after {cursor}"]
    assert process.returncode == 130


BAD = [
    (["--after", "x"], "--after: not a cursor"),
    (["--after", "9999999.0"], "cursor_ahead"),
    (["--since", "never"], "--since"),
    (["--after", "0", "--since", "1h"], "--after"),
    (["--family", "leases"], "--family: got 'leases'"),
    (["--tag", "x"], "--tag"),
    (["--flow", "zz"], "--flow: got 'zz'"),
    (["--execution", "zz"], "--execution: got 'zz'"),
    (["--kind", ""], "--kind: empty"),
]


@each(("options", "words"), BAD)
async def test_wrong_options_are_named(plain_engine: ff.Engine, database: str, options: list[str], words: str) -> None:
    said = await call("events", *options, dsn=database, code=2)
    assert words in said.err
    assert said.out == ""


async def test_consumers_are_listed_moved_and_deleted(plain_engine: ff.Engine, database: str) -> None:
    engine = plain_engine
    said = await call("consumers", dsn=database)
    assert "there is no consumer" in said.err

    async def nothing(*_: Any) -> None:
        """What it does."""

    await end_one(engine)
    consumer = ff.Consumer("invoices", family="completion", start=EventCursor())
    await consumer.run_once(engine, nothing)
    await end_one(engine)
    (row,) = json.loads((await call("consumers", "--json", dsn=database)).out)["consumers"]
    assert (row["name"], row["lag"], row["handled"], row["families"]) == ("invoices", 2, 1, ["completion"])
    assert "invoices" in (await call("consumers", "list", dsn=database)).out
    said = await call("consumers", "set", "invoices", "--to", "end", "--yes", dsn=database)
    assert said.out.endswith("0 events follow\n")
    for where in ("start", "1d", row["cursor"]):
        said = await call("consumers", "set", "invoices", "--to", where, "--yes", "--json", dsn=database)
        assert json.loads(said.out)["lag"] == (2 if where == row["cursor"] else 4)
    await call("consumers", "set", "other", "--to", "end", "--yes", dsn=database, code=1)
    said = await call("consumers", "set", "invoices", "--to", "nowhere", "--yes", dsn=database, code=2)
    assert "--to: got 'nowhere'; allowed: a cursor, start, end, a time" in said.err
    await call("consumers", "delete", "invoices", dsn=database, code=2)  # cannot ask
    assert (await call("consumers", "delete", "invoices", "--yes", dsn=database)).out == "deleted invoices\n"
    await call("consumers", "delete", "invoices", "--yes", dsn=database, code=1)


async def test_the_doctor_warns_of_consumers(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    async def finding() -> dict[str, Any]:
        said = await call("doctor", "--json", dsn=database, code=1)
        return next(one for one in json.loads(said.out)["findings"] if one["check"] == "consumers")

    assert (await finding())["verdict"] == "ok"
    await end_one(plain_engine)
    await ff.Consumer("c", family="completion", start=EventCursor(1)).register(plain_engine)
    assert (await finding())["verdict"] == "ok"
    await sql.execute("update flowfabric.consumer set failures = 3")
    assert "function fails" in (await finding())["detail"]
    await clock.advance(hours=25)
    assert "behind by more than half" in (await finding())["detail"]
    await sql.execute("update flowfabric.deployment set event_floor = (select max(seq) from flowfabric.event)")
    found = await finding()
    assert found["verdict"] == "problem"
    said = await call("consumers", dsn=database)
    assert "expired" in said.out
    assert "consumers set c --to start" in said.err


async def test_fork_starts_an_execution_and_show_says_where_it_came_from(
    plain_engine: ff.Engine, database: str
) -> None:
    held = await started(plain_engine, input_payload=b'{"x":0}')
    await plain_engine.record_steps([(held.handle, NewStep(name=name, result=b"1")) for name in ("a", "b")])
    said = await call("fork", held.execution_id, "--before", "b", "--payload", '{"x": 1}', "--json", dsn=database)
    made = json.loads(said.out)
    assert (made["forked_from"], made["forked_before"]) == (str(held.execution_id), "b")
    fork = ff.ExecutionId(made["execution_id"])
    assert [step.name for step in await plain_engine.read_steps([fork])] == ["a"]
    assert (await plain_engine.read_execution_context(fork)).input_payload == b'{"x":1}'
    said = await call("show", fork, dsn=database)
    assert f"{held.execution_id} before b" in said.out
    said = await call("ls", dsn=database)
    assert "FORK OF" in said.out
    assert [line.split()[-1] for line in said.out.splitlines() if str(fork) in line] == [str(held.execution_id)]
    said = await call("fork", held.execution_id, "--before", "c", dsn=database, code=2)
    assert f"--before: {held.execution_id} has not recorded c; allowed: a, b" in said.err
    said = await call("fork", held.execution_id, "--use", "2", dsn=database, code=2)
    assert "--use: without --before" in said.err
    for payload in ("[1]", "{"):
        await call("fork", held.execution_id, "--payload", payload, dsn=database, code=2)
    await call("fork", plain_engine.mint_id(), dsn=database, code=1)
    assert (await call("fork", held.execution_id, dsn=database)).out.strip().endswith(f"forks {held.execution_id}")


FORKED = """
import flowfabric as ff

app = ff.App(name="forked")

@app.task
async def write(prompt: str, tone: str = "calm") -> str:
    return prompt + tone
"""


async def test_fork_refuses_arguments_that_the_task_does_not_have(
    plain_engine: ff.Engine,
    sql: asyncpg.Connection[Any],
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "forked_app.py").write_text(FORKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    held = await started(plain_engine, execution_kind="write", input_payload=b'{"prompt":"a"}')
    sealed = await started(plain_engine, input_payload=b"??", payload_encoding="json+cipher")
    refusals = [
        (held, '{"promt": "b"}', [], "submitted without promt; did you mean prompt?"),
        (held, '{"tone": "b"}', [], "allowed: prompt, or others with --app"),
        (sealed, '{"tone": "b"}', [], "allowed: together with --app"),
        (held, '{"promt": "b"}', ["--app", "forked_app:app"], "takes no such argument"),
        (held, '{"tone": 1}', ["--app", "forked_app:app"], "tone"),
    ]
    before = await sql.fetchval("select count(*) from flowfabric.execution")
    for target, payload, options, words in refusals:
        said = await call("fork", target.execution_id, "--payload", payload, *options, dsn=database, code=2)
        assert words in said.err, payload
    assert await sql.fetchval("select count(*) from flowfabric.execution") == before
    taken: list[tuple[str, list[str], dict[str, str]]] = [
        ('{"prompt": "b"}', [], {"prompt": "b"}),
        ('{"tone": "b"}', ["--app", "forked_app:app"], {"prompt": "a", "tone": "b"}),
    ]
    for payload, options, expected in taken:
        said = await call("fork", held.execution_id, "--payload", payload, *options, "--json", dsn=database)
        made = ff.ExecutionId(json.loads(said.out)["execution_id"])
        assert json.loads((await plain_engine.read_execution_context(made)).input_payload or b"") == expected
