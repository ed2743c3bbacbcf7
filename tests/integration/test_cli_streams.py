"""`flowfabric tail` and `summary`: what an execution emits, for people, for programs, and as bytes."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.cli import tail
from flowfabric.values.attempt import Claimed
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.stream import BestEffortLive, DurableSummary, NewFrame
from tests.integration.test_cli import call
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import OTHER, claim_one, started, submit

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
        "attempt 2 (reclaimed)",
        "three",
        "blob: \\xff",
        "now",
        'summary: {"a": [1]}',
    ]
    said = await call("tail", held.execution_id, "--attempt", 2, "--no-live", dsn=database)
    assert said.out.splitlines() == ["three", "blob: \\xff", 'summary: {"a": [1]}']
    said = await call("tail", held.execution_id, "--raw", "--attempt", 1, dsn=database)
    assert said.out == 'one two\x1b[31m{"tokens": 2}'
    said = await call("tail", held.execution_id, "--type", "usage", "--type", "summary", dsn=database)
    assert said.out.splitlines() == ['usage: {"tokens": 2}', "attempt 2 (reclaimed)", 'summary: {"a": [1]}']


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
    assert (lines[3]["attempt"], lines[3]["reason"]) == (2, "reclaimed")
    assert lines[7]["type"] == "summary"
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


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_tail_says_that_an_execution_did_not_succeed(engine: ff.Engine, database: str, end: str) -> None:
    held = await started(engine)
    await engine.append_frame(held.handle, NewFrame(payload=b"one", kind="stdout"))
    if end == "failed":
        await engine.fail(held.handle, "boom", failure_class="permanent")
    else:
        await engine.cancel(held.handle, "no longer needed")
    said = await call("tail", held.execution_id, dsn=database, code=1)
    assert said.out == "one\n"
    assert end in said.err and ("boom" in said.err or "no longer needed" in said.err)


async def test_tail_says_what_a_silent_execution_waits_for(
    engine: ff.Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, explain = 0, tail._Silences.explain

    async def counted(silences: tail._Silences) -> str | None:
        nonlocal asked
        asked += 1
        return await explain(silences)

    monkeypatch.setattr(tail, "_SILENCE", 0.05)
    monkeypatch.setattr(tail._Silences, "explain", counted)
    made = await submit(engine)
    following = asyncio.create_task(call("tail", made, dsn=database))
    async with asyncio.timeout(30):
        while asked < 2:
            await asyncio.sleep(0.005)
    held = await claim_one(engine)
    await engine.complete(held.handle, b"1")
    said = await asyncio.wait_for(following, 30)
    assert said.err.count("is waiting") == 1 and str(made) in said.err


async def test_tail_says_what_is_no_longer_kept(engine: ff.Engine, database: str) -> None:
    policy = ExecutionPolicy(stream_policy=StreamPolicy(retention_maxlen=2))
    held = await started(engine, policy=policy)
    for n in range(5):
        await engine.append_frame(held.handle, NewFrame(payload=b"%d\n" % n, kind="stdout"))
    await engine.complete(held.handle, b"1")
    said = await call("tail", held.execution_id, dsn=database)
    assert said.out.splitlines() == ["3 frames are no longer kept", "3", "4"]
    first, *_ = (await call("tail", held.execution_id, "--json", dsn=database)).out.splitlines()
    assert json.loads(first)["missing"] == 3


async def test_tail_hints_at_the_app_that_reads_sealed_output(engine: ff.Engine, database: str) -> None:
    held = await started(engine)
    await engine.append_frame(held.handle, NewFrame(payload=b"x", kind="stdout", encoding="json+secret"))
    await engine.complete(held.handle, b"1")
    said = await call("tail", held.execution_id, dsn=database)
    assert said.out == "stdout: [sealed]\n"
    assert said.err.count("--app") == 1


async def test_a_flow_is_followed(engine: ff.Engine, database: str) -> None:
    app = ff.App(database, name="flows")

    @app.task
    async def node(ctx: ff.Context, name: str) -> None:
        await ctx.print(name)
        await ctx.print("a", "b", sep="\n")
        await ctx.emit({"n": 1}, type="usage")

    flow = app.flow("two")
    first = flow.add(node, "one", name="first")
    flow.add(node, "two", name="second", after=[first])
    async with ff.Worker(app, poll=0.05):
        run = await flow.submit()
        await run.wait(30)
    said = await call("flow", "tail", run.flow_id, dsn=database)
    await app.close()
    lines = said.out.splitlines()
    assert sorted(lines) == sorted(
        f"{name}: {line}" for name, word in (("first", "one"), ("second", "two"))
        for line in (word, "a", "b", 'usage: {"n":1}')
    )  # fmt: skip


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
    said = (await call("show", held.execution_id, "--payload", dsn=database)).out
    assert "Output, the last 2 of 4 frames (flowfabric tail)" in said
    assert "1 change (flowfabric summary)" in said
    one = await started(engine)
    await engine.append_frame(one.handle, NewFrame(payload=b"only"))
    assert "Output (flowfabric tail)" in (await call("show", one.execution_id, "--payload", dsn=database)).out
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
