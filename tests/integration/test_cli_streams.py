"""`flowfabric tail` and `summary`: what an execution emits, for people, for programs, and as bytes."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.stream import BestEffortLive, DurableSummary, NewFrame
from tests.integration.test_cli import call
from tests.kept import (  # noqa: F401 - fixtures
    kept_clock,
    kept_database,
    kept_engine,
    kept_plain_engine,
    kept_sql,
    kept_state,
    the_keeper,
)
from tests.support import OTHER, claim_one, started

LIVE = BestEffortLive(ttl=timedelta(minutes=5))


async def talked(engine: ff.Engine) -> Claimed:
    """An execution with two attempts that has ended."""
    held = await started(engine)
    for frame in (
        NewFrame(payload=b"one ", kind="stdout"),
        NewFrame(payload=b"two\x1b[31m", kind="stdout"),
        NewFrame(payload=b'{"tokens": 2}', frame_type="usage"),
    ):
        await engine.append_frame(held.handle, frame)
    await engine.revoke_lease(held.execution_id)
    again = await claim_one(engine, **OTHER)
    await engine.append_frame(again.handle, NewFrame(payload=b"three\n", kind="stdout"))
    await engine.append_frame(again.handle, NewFrame(payload=b"\xff", kind="blob"))
    await engine.append_frame(again.handle, NewFrame(payload=b"now", kind="stdout", mode=LIVE))
    await engine.append_frame(again.handle, NewFrame(payload=b'{"a": [1]}', mode=DurableSummary()))
    await engine.complete(again.handle, b"1")
    return again


async def test_tail_shows_the_output_and_ends_with_the_execution(engine: ff.Engine, database: str) -> None:
    held = await talked(engine)
    said = await call("tail", held.execution_id, dsn=database)
    assert said.out.splitlines() == [
        "one two\\x1b[31m",
        'usage: {"tokens": 2}',
        "attempt 2",
        "three",
        "blob: \\xff",
        "now",
        'event: {"a": [1]}',
    ]
    said = await call("tail", held.execution_id, "--attempt", 2, "--no-live", dsn=database)
    assert said.out.splitlines() == ["three", "blob: \\xff", 'event: {"a": [1]}']


async def test_tail_as_json_continues_after_a_cursor(engine: ff.Engine, database: str) -> None:
    held = await talked(engine)
    lines = [
        json.loads(line) for line in (await call("tail", held.execution_id, "--json", dsn=database)).out.splitlines()
    ]
    assert [(line["status"], line.get("payload")) for line in lines] == [
        ("frame", "one "),
        ("frame", "two\x1b[31m"),
        ("frame", '{"tokens": 2}'),
        ("new_attempt", None),
        ("frame", "three\n"),
        ("frame", {"base64": "/w=="}),
        ("frame", "now"),
        ("frame", '{"a": [1]}'),
    ]
    for place in (0, 3, 6):
        rest = await call("tail", held.execution_id, "--json", "--after", lines[place]["cursor"], dsn=database)
        assert [json.loads(line) for line in rest.out.splitlines()] == lines[place + 1 :]


async def test_tail_follows_while_the_execution_runs(engine: ff.Engine, database: str) -> None:
    held = await started(engine)
    following = asyncio.create_task(call("tail", held.execution_id, dsn=database))
    for n in range(3):
        await engine.append_frame(held.handle, NewFrame(payload=b"%d\n" % n, kind="stdout"))
    await engine.complete(held.handle, b"1")
    assert (await asyncio.wait_for(following, 30)).out == "0\n1\n2\n"


async def test_summary_prints_the_document(engine: ff.Engine, database: str) -> None:
    held = await talked(engine)
    assert (await call("summary", held.execution_id, dsn=database)).json == {"a": [1]}
    facts = (await call("summary", held.execution_id, "--json", dsn=database)).json
    assert (facts["version"], facts["attempt"], facts["document"]) == (1, 2, {"a": [1]})
    none = await call("summary", held.execution_id, "--attempt", 1, dsn=database)
    assert (none.out, none.err.strip()) == ("", "no summary")
    watched = await call("summary", held.execution_id, "--watch", dsn=database)
    assert watched.json == {"a": [1]}


async def test_show_says_how_much_output_there_is(engine: ff.Engine, database: str) -> None:
    held = await talked(engine)
    assert "output" in (await call("show", held.execution_id, dsn=database)).out
    assert (await call("show", held.execution_id, "--json", dsn=database)).json["frame_count"] == 4


@pytest.mark.parametrize(
    "arguments",
    [("--after", "x"), ("--after", "1-1"), ("--attempt", "0"), ("--raw", "--json")],
)
async def test_bad_arguments_of_tail_are_refused(engine: ff.Engine, database: str, arguments: Any) -> None:
    held = await talked(engine)
    assert "flowfabric: " in (await call("tail", held.execution_id, *arguments, dsn=database, code=2)).err


async def test_an_unknown_execution_is_said(database: str) -> None:
    for command in ("tail", "summary"):
        said = await call(command, "0b0e8400-e29b-41d4-a716-446655440000", dsn=database, code=1)
        assert "not found" in said.err
