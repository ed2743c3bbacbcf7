"""Commands for flows: show, ls, export, wait, cancel, replay, delete; what `show` and `ls` say of members."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import pty
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID
from xml.etree import ElementTree

import pytest
import pytest_asyncio
from click.testing import CliRunner

import flowfabric as ff
from flowfabric._duties.flow_cancel import FlowCancel
from flowfabric._duties.flow_summaries import FlowSummaries
from flowfabric.client import AsyncClient
from flowfabric.errors import TimedOut
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import CancellationPolicy, FlowCancelled, PartiallyCancelled
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import FlowId
from flowfabric.values.joins import AllOf, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.state import State
from flowfabric.values.stream import NewFrame
from tests.integration.test_cli import COMMAND_TREE, PROGRAM, Answer, call, on_a_terminal, run
from tests.kept import *  # noqa: F403 - its fixtures
from tests.sql.flowing import Flow, drain, submitted
from tests.support import Clock, submit

MEGA = FlowId(UUID("aaaaaaaa-0000-4000-8000-000000000001"))
EVIL = "n\x1b[31m\u202e"
GONE = "0190aaaa-0000-7000-8000-000000000000"
COMMANDS = (
    ["flow", "show"],
    ["flow", "export"],
    ["flow", "wait"],
    ["flow", "cancel", "--yes"],
    ["flow", "replay"],
    ["flow", "delete", "--yes"],
    ["ls", "--flow"],
)


@pytest_asyncio.fixture(loop_scope="session")
async def ask(database: str) -> Any:
    """Runs a command on this database."""

    async def asked(*arguments: object, **options: Any) -> Answer:
        return await call(*map(str, arguments), dsn=database, **options)

    return asked


async def named(
    engine: ff.Engine,
    name: str = "",
    graph: Mapping[str, Sequence[str]] | None = None,
    policies: Mapping[str, EdgeGroupPolicy] | None = None,
    *,
    flow_id: FlowId | None = None,
    namespace: str = "",
    **fields: Any,
) -> FlowId:
    """A flow with a name, whose members are all of one kind."""
    made = await engine.submit_flow(
        [
            NewNode(
                name=node,
                execution=NewExecution(**{"execution_kind": "work", **fields}),
                after=[NewEdge(upstream=up) for up in ups],
                policy=(policies or {}).get(node, AllOf()),
            )
            for node, ups in (graph or {"a": []}).items()
        ],
        flow_kind=name,
        flow_id=flow_id,
        namespace=namespace,
    )
    return made.flow_id


def diamond() -> dict[str, list[str]]:
    return {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


def picture(said: Answer) -> list[str]:
    """The lines of the drawing: between the first empty line and the next."""
    lines = said.out.splitlines()
    rest = lines[lines.index("") + 1 :]
    return rest[: rest.index("Failures") - 1] if "Failures" in rest else rest


# show


async def test_a_flow_is_drawn_with_its_states(engine: ff.Engine, clock: Clock, ask: Any) -> None:
    flow = await submitted(engine, diamond())
    await flow.complete("a")
    await flow.claim("b")
    await clock.advance(minutes=2)
    said = await ask("flow", "show", flow.id)
    head = said.out.splitlines()[0]
    assert re.sub(r"2 min.* old", "2 min old", head) == (
        f"test  {flow.id}  running  4 nodes: 1 waiting, 1 waiting_children, 1 active, 1 completed  2 min old"
    )
    assert picture(said) == [
        "✓    a  completed",
        "├─╮",
        "► │  b  active            after a",
        "│ ○  c  waiting           after a",
        "├─╯",
        "◇    d  waiting_children  after b, c",
    ]
    assert said.err == ""


async def test_failures_are_listed_below_with_node_and_first_line(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, diamond(), namespace="media")
    await flow.complete("a")
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no good\nsecond line'
    await engine.fail((await flow.claim("b")).handle, trace, failure_class="permanent")
    await drain(engine)
    await flow.complete("c")
    said = await ask("flow", "show", flow.id)
    head, *_ = lines = said.out.splitlines()
    assert re.fullmatch(
        rf"test  {flow.id}  failed  4 nodes: 2 completed, 1 failed, 1 skipped  \S+ m?s old, took \S+ m?s  in media",
        head,
    )
    place = lines.index("Failures")
    assert lines[place + 1].split() == ["NODE", "STATE", "ID", "FAILURE"]
    assert lines[place + 2 :] == [f"b     failed  {flow['b']}  ValueError: no good"]


async def test_many_failures_are_not_all_listed(plain_engine: ff.Engine, ask: Any) -> None:
    flow_id = await named(plain_engine, "much", {f"n{place}": [] for place in range(25)})
    for claimed in await plain_engine.claim_many(limit=30, worker_id="w", worker_instance_id="w1"):
        await plain_engine.fail(claimed.handle, "boom", failure_class="permanent")
    lines = (await ask("flow", "show", flow_id)).out.splitlines()
    place = lines.index("Failures, the first 20 of 25")
    assert len(lines) - place - 2 == 20


async def test_the_state_is_that_of_the_summary(engine: ff.Engine, ask: Any) -> None:
    async def state(flow: Flow) -> str:
        answer = (await ask("flow", "show", flow.id, "--json")).json
        assert answer["public_flow_state"] == answer["summary"]["public_flow_state"]
        head = (await ask("flow", "show", flow.id)).out.splitlines()[0]
        assert f"  {answer['public_flow_state']}  " in head
        return str(answer["public_flow_state"])

    flow = await submitted(engine, {"a": [], "b": ["a"]})
    assert await state(flow) == "blocked"  # b waits for another member
    claimed = await flow.claim("a")
    assert await state(flow) == "running"
    await engine.complete(claimed.handle)
    assert await state(flow) == "open"
    await flow.complete("b")
    assert await state(flow) == "completed"


async def test_the_loser_of_a_race_has_not_failed(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": [], "j": ["a", "b"]}, {"j": AnyOf()})
    await flow.complete("a")
    await drain(engine)
    await flow.complete("j")
    said = await ask("flow", "show", flow.id)
    assert "  completed  3 nodes: 2 completed, 1 cancelled  " in said.out
    assert "after any of 2: a, b" in said.out
    assert "Failures" not in said.out


async def test_alike_members_are_one_line_until_expanded(engine: ff.Engine, ask: Any) -> None:
    parts = [f"part[{place}]" for place in range(9)]
    flow_id = await named(engine, "map", {**{one: [] for one in parts}, "sum": parts})
    folded = picture(await ask("flow", "show", flow_id))
    assert [re.split(r"\s{2,}", line)[1] for line in folded if line[0] in "○◇"] == ["part \u00d7 9", "sum"]
    assert "9 waiting" in folded[0]
    whole = "\n".join(picture(await ask("flow", "show", flow_id, "--expand")))
    assert all(one in whole for one in parts)
    assert (await ask("flow", "export", flow_id)).out.count(" --> ") == 1
    assert (await ask("flow", "export", flow_id, "--expand")).out.count(" --> ") == 9


async def test_where_there_is_no_unicode_it_is_ascii(engine: ff.Engine, database: str) -> None:
    flow_id = await named(engine, "käse", {"ä": [], "b": ["ä"], "c": ["ä"]})

    async def show(encoding: str) -> str:
        said = await asyncio.to_thread(run, "flow", "show", str(flow_id), "--dsn", database, PYTHONIOENCODING=encoding)
        assert (said.returncode, said.stderr) == (0, "")
        return said.stdout

    plain = await show("ascii")
    assert plain.isascii()
    assert re.search(r"^o \s*\\xe4 +waiting$", plain, re.M), plain
    assert "+-+" in plain
    assert re.search(r"^○ \s*ä +waiting$", await show("utf-8"), re.M)


async def test_a_terminal_gets_colours_and_nothing_too_wide(engine: ff.Engine, database: str) -> None:
    parts = [f"a long name of part number {place}" for place in range(6)]
    flow = await submitted(engine, {**{one: [] for one in parts}, "sum": parts, "alone": []})
    await flow.fail("alone")
    for columns in (50, 200):
        code, seen = await asyncio.to_thread(
            on_a_terminal, "flow", "show", str(flow.id), "--dsn", database, columns=columns
        )
        assert code == 0, seen
        assert "\x1b[31mfailed\x1b[0m" in seen
        assert "\x1b[34mwaiting\x1b[0m" in seen
        assert "\x1b[90mwaiting_children" in seen or columns == 50
        drawn = re.sub(r"\x1b\[[0-9;]*m", "", seen).split("\r\n\r\n")[1].splitlines()
        assert all(len(line) <= columns for line in drawn)
        assert any(line.endswith("…") for line in drawn) == (columns == 50)


async def test_json_has_the_whole_graph(engine: ff.Engine, ask: Any) -> None:
    rest = OnSatisfied.LET_RUN
    flow = await submitted(engine, {"a": [], "b": [], "j": ["a", "b"]}, {"j": Quorum(2, rest)}, ref="result")
    await flow.fail("a")
    answer = (await ask("flow", "show", flow.id, "--json")).json
    assert list(answer) == ["flow", "public_flow_state", "summary", "nodes", "edges"]
    assert answer["flow"]["flow_id"] == str(flow.id)
    assert answer["flow"]["edge_groups"][0]["policy"] == {"kind": "quorum", "k": 2, "on_satisfied": "let_run"}
    assert (answer["summary"]["total_members"], answer["summary"]["members_failed"]) == (3, 1)
    first = answer["nodes"][0]
    assert first == {
        "execution_id": str(flow["a"]),
        "name": "a",
        "execution_kind": flow.kind("a"),
        "state": "failed",
        "created_at": first["created_at"],
        "started_at": first["started_at"],
        "completed_at": first["completed_at"],
        "failure_reason": "boom",
        "cancellation_reason": None,
        "policy": None,
    }
    assert [one["policy"] for one in answer["nodes"]] == [None, None, answer["flow"]["edge_groups"][0]["policy"]]
    assert {(one["upstream_execution_id"], one["downstream_execution_id"]) for one in answer["edges"]} == {
        (str(flow["a"]), str(flow["j"])),
        (str(flow["b"]), str(flow["j"])),
    }
    assert {one["data_passing_ref"] for one in answer["edges"]} == {"result"}


async def test_a_flow_without_members_can_be_shown(engine: ff.Engine, ask: Any) -> None:
    await engine.create_flow(MEGA, flow_kind="later")
    said = await ask("flow", "show", MEGA)
    assert said.out.startswith(f"later  {MEGA}  open  0 nodes  ")
    assert picture(said) == ["no members"]
    assert (await ask("flow", "show", MEGA, "--json")).json["summary"] is None
    assert "is open" in (await ask("flow", "wait", MEGA, code=1)).err
    assert "no node failed" in (await ask("flow", "replay", MEGA)).err
    assert (await ask("flow", "cancel", MEGA, "-y")).out == f"{MEGA} cancelled: no nodes\n"
    assert f"later  {MEGA}  cancelled  0 nodes  " in (await ask("flow", "show", MEGA, "--watch", code=1)).out


async def test_a_cancelled_flow_says_why_and_lists_only_what_failed(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": [], "c": []})
    await flow.fail("a")
    await engine.cancel_flow(flow.id, reason="too\nlate", wait=True)
    said = await ask("flow", "show", flow.id)
    assert re.search(r"^cancelled \S+ \S+ \(cancel_all\): too late$", said.out, re.M)
    _, failures = said.out.split("Failures\n")
    assert [line.split()[0] for line in failures.splitlines()[1:]] == ["a"]


# show --watch


class Watching:
    """`flow show --watch` in a pipe, read as it is written."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def begin(cls, database: str, flow: Flow, *arguments: str) -> AsyncIterator[Watching]:
        command = ["flow", "show", str(flow.id), "--watch", "--interval", "100ms", *arguments, "--dsn", database]
        process = await asyncio.create_subprocess_exec(PROGRAM, *command, stdout=asyncio.subprocess.PIPE, limit=2**20)
        try:
            yield cls(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    async def until(self, word: str) -> None:
        """Read on until a line has this."""
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            while line := (await self._process.stdout.readline()).decode():
                self.lines.append(line.rstrip("\n"))
                if word in line:
                    return
        raise AssertionError(self.lines)

    async def end(self) -> int:
        """Read the rest; answers the exit code."""
        rest, _ = await asyncio.wait_for(self._process.communicate(), 60)
        self.lines += rest.decode().splitlines()
        assert self._process.returncode is not None
        return self._process.returncode


async def test_a_watch_ends_with_the_flow(engine: ff.Engine, database: str) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    async with Watching.begin(database, flow) as watching:
        await watching.until("  blocked  ")
        await flow.complete("a")
        await watching.until("  open  ")
        claimed = await flow.claim("b")
        await watching.until("  running  ")
        await asyncio.sleep(0.5)  # some looks at which nothing is new
        await engine.complete(claimed.handle)
        assert await watching.end() == 0
    frames = "\n".join(watching.lines).split("\n\ntest  ")
    assert frames[0].startswith(f"test  {flow.id}  blocked  ")
    assert frames[-1].startswith(f"{flow.id}  completed  ")
    assert len(set(frames)) == len(frames), "what did not change is not written again"


async def test_a_watch_shows_the_last_line_of_each_active_node(engine: ff.Engine, database: str) -> None:
    flow = await submitted(engine, {"a": [], "b": [], "c": ["a"]})
    first, second = await flow.claim("a"), await flow.claim("b")
    async with Watching.begin(database, flow) as watching:
        await engine.append_frame(first.handle, NewFrame(payload=b"first\nsecond \x1b[31mred\n"))
        await watching.until("second ")
        assert watching.lines[-1].split(maxsplit=1) == ["a", r"second \x1b[31mred"]
        await engine.append_frame(second.handle, NewFrame(payload=b"tok"))
        await engine.append_frame(second.handle, NewFrame(payload=b"ens"))
        await watching.until("tokens")
        await engine.complete(first.handle)
        await engine.complete(second.handle)
        await flow.complete("c")
        assert await watching.end() == 0
    assert "Output" not in "\n".join(watching.lines).rpartition(str(flow.id))[2]


async def test_a_watch_for_programs_is_a_line_each_time(engine: ff.Engine, database: str) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    async with Watching.begin(database, flow, "--json") as watching:
        await watching.until("blocked")
        await flow.fail("a")
        assert await watching.end() == 1
    frames = [json.loads(line) for line in watching.lines]
    assert [frames[place]["public_flow_state"] for place in (0, -1)] == ["blocked", "failed"]
    assert [one["state"] for one in frames[-1]["nodes"]] == ["failed", "skipped"]


async def test_a_watch_polls_neither_too_often_nor_too_seldom(engine: ff.Engine, ask: Any) -> None:
    flow_id = await named(engine)
    for interval in ("10ms", "2h", "often"):
        assert "--interval" in (await ask("flow", "show", flow_id, "--watch", "--interval", interval, code=2)).err


async def test_a_watch_on_a_terminal_redraws_in_place(engine: ff.Engine, database: str) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    watching = subprocess.Popen(
        [PROGRAM, "flow", "show", str(flow.id), "-w", "-i", "100ms", "--dsn", database],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    seen = ""

    async def read_until(word: str) -> None:
        nonlocal seen
        while word not in seen:
            seen += (await asyncio.to_thread(os.read, ours, 65536)).decode()

    await asyncio.wait_for(read_until("waiting_children"), 30)
    await flow.complete("a")
    await asyncio.wait_for(read_until("1 completed"), 30)
    await flow.complete("b")
    await asyncio.wait_for(read_until("2 completed"), 30)
    assert await asyncio.to_thread(watching.wait, 30) == 0
    os.close(ours)
    assert "\x1b[1A" in seen, "the cursor goes up to draw again"
    assert "\x1b[?1049h" not in seen, "the last picture stays"


# ls


async def test_flows_are_listed_newest_first(engine: ff.Engine, clock: Clock, ask: Any) -> None:
    old = await submitted(engine, {"a": [], "b": []})
    await old.complete("a", "b")
    await clock.advance(hours=3)
    new = await named(engine, "etl nightly")
    await FlowSummaries(engine).run_once()
    said = await ask("flow", "ls")
    lines = [re.split(r"\s{2,}", line) for line in said.out.splitlines()]
    assert lines[0] == ["ID", "STATE", "NODES", "AGE", "NAME"]
    assert [(line[0], line[1], line[2], line[4]) for line in lines[1:]] == [
        (str(new), "open", "1", "etl nightly"),
        (str(old.id), "completed", "2", "test"),
    ]
    assert lines[2][3].startswith("3 h")
    assert (await ask("flow")).out.splitlines()[1].startswith(str(new)), "without a command it lists"
    answer = (await ask("flow", "ls", "--json")).json
    assert list(answer) == ["items", "next_cursor"]
    assert answer["items"][1] == {
        "flow_id": str(old.id),
        "created_at": answer["items"][1]["created_at"],
        "status": "completed",
        "state": "completed",
        "flow_kind": "test",
        "namespace": "",
        "node_count": 2,
    }


async def test_lists_are_filtered_and_paged(engine: ff.Engine, ask: Any) -> None:
    one = await named(engine, "etl", namespace="a")
    two = await named(engine, "etl", namespace="b")
    three = await named(engine, "report", namespace="b")

    async def ids(*arguments: str) -> list[str]:
        return [item["flow_id"] for item in (await ask("flow", "ls", "--json", *arguments)).json["items"]]

    assert await ids("--name", "etl") == [str(two), str(one)]
    assert await ids("--namespace", "b") == [str(three), str(two)]
    assert await ids("--name", "etl", "--namespace", "b") == [str(two)]
    assert "NAMESPACE" in (await ask("flow", "ls")).out
    page = await ask("flow", "ls", "--limit", "2")
    assert [line.split()[0] for line in page.out.splitlines()[1:]] == [str(three), str(two)]
    cursor = re.search(r"--cursor (\S+)", page.err)
    assert cursor is not None
    assert await ids("--cursor", cursor[1]) == [str(one)]
    assert (await ask("flow", "ls", "--name", "repotr")).err == "no flow matches; did you mean report?\n"
    assert (await ask("flow", "ls", "--namespace", "c")).err == "no flow matches\n"
    assert "cursor" in (await ask("flow", "ls", "--cursor", "x", code=2)).err
    assert "--limit" in (await ask("flow", "ls", "--limit", "0", code=2)).err


# Which flow is meant


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: "-".join(words))
async def test_a_flow_that_is_not_there(engine: ff.Engine, ask: Any, command: list[str]) -> None:
    alone = await submit(engine)
    flow = await submitted(engine, {"a": []})
    said = await ask(*command, GONE, code=1)
    assert said.err == f"flowfabric: not found: flow {GONE} (`flowfabric flow ls` lists all)\n"
    assert said.out == ""
    said = await ask(*command, GONE[-8:], code=1)
    assert f"not found: flow {GONE[-8:]}" in said.err
    for text in (flow["a"], str(flow["a"])[-8:]):
        assert f"it is an execution of flow {flow.id}" in (await ask(*command, text, code=1)).err
    assert "without a flow" in (await ask(*command, alone, code=1)).err
    for wrong in ("test", "123", "", f"{flow.id}0", "{fp:1}:x"):
        said = await ask(*command, wrong, code=2)
        assert said.err.startswith("flowfabric: ID: ") or "ID" in said.err, said
        assert said.out == ""
    assert await engine.read_execution_state(flow["a"]) is State.WAITING


async def test_the_end_or_the_beginning_of_an_id_is_enough(engine: ff.Engine, ask: Any) -> None:
    for tail in ("0001", "0002", "0003", "0004", "0005"):
        await named(engine, tail, flow_id=FlowId(UUID(f"aaaaaaaa-0000-4000-8000-00ab0000{tail}")))
    last = FlowId(UUID("ffffffff-ffff-ffff-ffff-ffffffffffff"))
    first = FlowId(UUID(int=0))
    third = FlowId(UUID("aaaaaaaa-0000-4000-8000-00ab00000003"))
    await named(engine, "last", flow_id=last)
    await named(engine, "first", flow_id=first)
    for text, flow_id in (
        ("ffffff", last), ("FFFFFFFF-FF", last), ("f" * 32, last), (" ffffffff ", last), ("000000", first),
        (str(first), first), (str(third), third), ("b00000003", third), (f"{{fp:1}}:{third}", third),
    ):  # fmt: skip
        assert (await ask("flow", "show", text, "--json")).json["flow"]["flow_id"] == str(flow_id)
    said = await ask("flow", "cancel", "-y", "aaaaaaaa", code=2)
    assert "aaaaaaaa-0000-4000-8000-00ab00000001  0001  active  " in said.err
    assert "5 flows end or begin with aaaaaaaa" in said.err
    assert "more of the id" in said.err
    assert "at least 6 hex digits" in (await ask("flow", "show", "fffff", code=2)).err


async def test_show_draws_the_flow_of_an_id_and_other_commands_name_it(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": []})
    drawn = (await ask("flow", "show", str(flow.id))).out.splitlines()
    for text in (str(flow.id), str(flow.id)[-8:], f"{{fp:1}}:{flow.id}"):
        shown = (await ask("show", text)).out.splitlines()
        assert str(flow.id) in shown[0]
        assert shown[1:] == drawn[1:]  # the first line has its age
        assert (await ask("show", text, "--json")).json["flow"]["flow_id"] == str(flow.id)
        assert f"it is a flow: `flowfabric flow show {flow.id}`" in (await ask("wait", text, code=1)).err
    assert "`flowfabric ls` lists all" in (await ask("show", GONE, code=1)).err


# export


async def test_export_speaks_three_languages(engine: ff.Engine, ask: Any, tmp_path: Path) -> None:
    flow = await submitted(engine, {"a & <b>": [], "c": ["a & <b>"]})
    await flow.complete("a & <b>")
    mermaid = (await ask("flow", "export", flow.id)).out
    assert mermaid.startswith("flowchart TD\n")
    assert (await ask("flow", "export", flow.id, "--format", "mermaid")).out == mermaid
    dot = (await ask("flow", "export", flow.id, "--format", "dot")).out
    assert dot.startswith("digraph flow {\n")
    svg = (await ask("flow", "export", flow.id, "--format", "svg")).out
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    drawn = {one.get("data-execution-id") for one in root.iter() if one.get("data-execution-id")}
    assert drawn == {str(flow["a & <b>"]), str(flow["c"])}
    words = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "✓ a & <b>" in words
    assert "completed" in words

    for ending, text in (
        (".svg", svg),
        (".SVG", svg),
        (".dot", dot),
        (".gv", dot),
        (".mmd", mermaid),
        (".txt", mermaid),
    ):
        target = tmp_path / f"x{ending}"
        said = await ask("flow", "export", flow.id, "--out", target)
        assert said.out == ""
        assert said.err.startswith(f"{target}: ")
        assert target.read_text(encoding="utf-8") == text
    await ask("flow", "export", flow.id, "--out", tmp_path / "x.svg", "--format", "dot")
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == dot, "what is said counts, not the ending"


async def test_export_is_utf8_wherever_it_goes(engine: ff.Engine, database: str) -> None:
    flow_id = await named(engine, "käse", {"ä": []})
    said = await asyncio.to_thread(
        subprocess.run,
        [PROGRAM, "flow", "export", str(flow_id), "--format", "svg", "--dsn", database],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True,
    )  # fmt: skip
    assert "○ ä" in said.stdout.decode()


async def test_export_refuses_what_it_cannot_do(engine: ff.Engine, ask: Any, tmp_path: Path) -> None:
    flow_id = await named(engine)
    said = await ask("flow", "export", flow_id, "--format", "png", code=2)
    assert "mermaid" in said.err
    assert "svg" in said.err
    said = await ask("flow", "export", flow_id, "--out", tmp_path / "no" / "x.svg", code=2)
    assert said.err.startswith("flowfabric: No such file or directory")


# wait


async def test_wait_prints_results_by_node(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    waiting = asyncio.create_task(ask("flow", "wait", flow.id))
    await flow.complete("a", result=b'{"n": 1}')
    await flow.complete("b", result=b'"two"')
    said = await asyncio.wait_for(waiting, 30)
    assert [line.split(maxsplit=1) for line in said.out.splitlines()] == [
        ["NODE", "RESULT"],
        ["a", '{"n": 1}'],
        ["b", "two"],
    ]
    answer = (await ask("flow", "wait", flow.id, "--json")).json
    assert answer == {
        "flow_id": str(flow.id),
        "public_flow_state": "completed",
        "is_ended": True,
        "results": {"a": {"n": 1}, "b": "two"},
        "failures": {},
        "skipped": [],
    }


async def test_wait_says_what_failed(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, diamond())
    await flow.complete("a")
    await flow.fail("b")
    await drain(engine)
    await flow.complete("c")
    said = await ask("flow", "wait", flow.id, code=1)
    assert said.err.splitlines() == [f"flowfabric: {flow.id} is failed", "b failed: boom"]
    answer = (await ask("flow", "wait", flow.id, "--json", code=1)).json
    assert (answer["public_flow_state"], answer["skipped"], list(answer["results"])) == ("failed", ["d"], ["a", "c"])
    assert answer["failures"] == {
        "b": {
            "execution_id": str(flow["b"]),
            "public_state": "failed",
            "failure_reason": "boom",
            "failure_category": answer["failures"]["b"]["failure_category"],
            "cancellation_reason": None,
        }
    }


async def test_a_wait_can_time_out(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": []})
    await flow.complete("a")
    said = await ask("flow", "wait", flow.id, "--timeout", "200ms", code=3)
    assert said.err == (f"flowfabric: {flow.id} did not end in time; it is open, 1 of 2 nodes have not ended\n")
    answer = (await ask("flow", "wait", flow.id, "--timeout", "200ms", "--json", code=3)).json
    assert answer == {"flow_id": str(flow.id), "public_flow_state": "open", "is_ended": False}
    assert "--timeout" in (await ask("flow", "wait", flow.id, "--timeout", "soon", code=2)).err


# cancel


@pytest.mark.parametrize(
    ("policy", "states"),
    [
        ("cancel_all", ["completed", "cancelled", "cancelled", "cancelled"]),
        ("cancel_pending", ["completed", "active", "cancelled", "cancelled"]),
        ("flow_only", ["completed", "active", "waiting", "waiting_children"]),
    ],
)
async def test_cancel_does_as_its_policy_says(engine: ff.Engine, ask: Any, policy: str, states: list[str]) -> None:
    flow = await submitted(engine, {"done": [], "running": [], "waiting": [], "blocked": ["running"]})
    await flow.complete("done")
    await flow.claim("running")
    said = await ask("flow", "cancel", flow.id, "--policy", policy, "--reason", "no more", "--yes")
    assert said.out.startswith(f"{flow.id} cancelled: ")
    assert list((await flow.states()).values()) == states
    header = await flow.describe()
    assert (header.public_flow_state, header.cancel_reason) == ("cancelled", "no more")
    assert header.cancellation_policy == policy


async def test_cancel_is_cancel_all_and_may_be_repeated(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    answer = (await ask("flow", "cancel", flow.id, "-y", "--json")).json
    summary = answer.pop("summary")
    assert summary["members_cancelled"] == 2
    assert answer == {
        "flow_id": str(flow.id),
        "is_new": True,
        "cancellation_policy": "cancel_all",
        "cancel_reason": "cancelled by an operator",
        "public_flow_state": "cancelled",
        "scheduled": 0,
        "failed_member_execution_ids": [],
    }
    again = await ask("flow", "cancel", flow.id, "--policy", "flow_only", "--reason", "again")
    assert again.out == f"{flow.id} was cancelled before (cancel_all): 2 cancelled\n"
    answer = (await ask("flow", "cancel", flow.id, "--json")).json
    assert (answer["is_new"], answer["cancel_reason"]) == (False, "cancelled by an operator")


async def test_without_waiting_the_duties_cancel(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    said = await ask("flow", "cancel", flow.id, "--no-wait", "-y")
    assert "a worker cancels 2 nodes in the background" in said.err
    assert "cancelled" not in (await flow.states()).values()
    while await FlowCancel(engine).run_once():
        pass
    assert set((await flow.states()).values()) == {"cancelled"}


async def test_cancel_asks_first(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": []})
    await flow.complete("a")
    question = f"cancel flow {flow.id} (test, 2 nodes, open)? 1 of its nodes have not ended."
    said = await ask("flow", "cancel", flow.id, answer="n\n", code=1)
    assert question in said.err
    assert "nothing was changed" in said.err
    assert "confirm with --yes" in (await ask("flow", "cancel", flow.id, code=2)).err
    assert await flow.state("b") == "waiting"
    await ask("flow", "cancel", flow.id, answer="y\n")
    assert await flow.state("b") == "cancelled"
    assert "cancel_all" in (await ask("flow", "cancel", flow.id, "-y", "--policy", "none", code=2)).err


async def test_a_cancel_may_be_late_or_leave_some_over(
    engine: ff.Engine, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = await submitted(engine, {"a": [], "b": []})

    async def late(*_: Any, **__: Any) -> FlowCancelled:
        raise TimedOut("cancel_flow", 300_000)

    monkeypatch.setattr(ff.Engine, "cancel_flow", late)
    said = await ask("flow", "cancel", flow.id, "-y", code=3)
    assert "did not finish" in said.err
    assert "in the background" in said.err

    async def partly(*_: Any, **__: Any) -> PartiallyCancelled:
        return PartiallyCancelled(
            cancellation_policy=CancellationPolicy.CANCEL_ALL,
            member_execution_ids=(flow["a"], flow["b"]),
            failed_member_execution_ids=(flow["b"],),
        )

    monkeypatch.setattr(ff.Engine, "cancel_flow", partly)
    assert f"{flow['b']} could not be cancelled yet" in (await ask("flow", "cancel", flow.id, "-y", code=1)).err
    answer = (await ask("flow", "cancel", flow.id, "-y", "--json", code=1)).json
    assert answer["failed_member_execution_ids"] == [str(flow["b"])]


# replay


async def finish(flow: Flow) -> None:
    """Complete what can be until nothing is left to claim."""
    while True:
        ready = await flow.engine.claim_many(limit=100, worker_id="w", worker_instance_id="w1")
        for claimed in ready:
            await flow.engine.complete(claimed.handle)
        await drain(flow.engine)
        if not ready:
            return


async def test_replay_reruns_failed_and_skipped_members(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {**diamond(), "e": ["d"], "other": []})
    await flow.complete("a", "c", "other")
    await flow.fail("b")
    await drain(engine)
    assert await flow.states("d", "e") == {"d": "skipped", "e": "skipped"}
    said = await ask("flow", "replay", flow.id, "--reason", "fixed")
    assert said.out == "3 replayed: b, d, e\n"
    assert await flow.states("a", "b", "d") == {"a": "completed", "b": "waiting", "d": "waiting_children"}
    await finish(flow)
    assert set((await flow.states()).values()) == {"completed"}
    attempt = (await engine.list_attempts(flow["b"]))[-1]
    assert (attempt.replay_reason, attempt.replay_requested_by) == ("fixed", getpass.getuser())
    assert (await ask("flow", "replay", flow.id)).err == "nothing to replay: no node failed\n"
    assert (await ask("flow", "replay", flow.id, "--json")).json == {
        "flow_id": str(flow.id),
        "replayed": [],
        "refused": [],
    }


async def handle_of(engine: ff.Engine, flow: Flow) -> ff.FlowRun:
    app = ff.App()
    client = AsyncClient(engine, app)
    app.adopt(client)
    return client.flow(flow.id)


@pytest.mark.parametrize("way", ["command", "handle"])
async def test_losers_of_a_race_and_their_downstreams_are_not_replayed(engine: ff.Engine, ask: Any, way: str) -> None:
    graph = {"a": [], "b": [], "j": ["a", "b"], "after b": ["b"], "last": ["after b"], "bad": [], "after bad": ["bad"]}
    flow = await submitted(engine, {**graph, "both": ["b", "bad"]}, {"j": AnyOf()})
    await flow.complete("a")
    await drain(engine)
    await flow.complete("j")
    if way == "command":
        assert "lost a race" in (await ask("flow", "replay", flow.id)).err
    await flow.fail("bad")
    await drain(engine)
    before = await flow.states()
    assert {name for name, state in before.items() if state == "skipped"} == {"after b", "last", "after bad", "both"}
    if way == "command":
        assert (await ask("flow", "replay", flow.id, "--json")).json["replayed"] == ["bad", "after bad"]
    else:
        assert await (await handle_of(engine, flow)).replay() == ["bad", "after bad"]
    await finish(flow)
    assert await flow.states() == {**before, "bad": "completed", "after bad": "completed"}


@pytest.mark.parametrize("way", ["command", "handle"])
async def test_a_member_cancelled_because_a_join_failed_is_replayed(engine: ff.Engine, ask: Any, way: str) -> None:
    flow = await submitted(engine, {"a": [], "b": [], "c": [], "j": ["a", "b", "c"]}, {"j": Quorum(3)})
    await flow.fail("a")
    await drain(engine)
    assert await flow.states("b", "c", "j") == {"b": "cancelled", "c": "cancelled", "j": "skipped"}
    if way == "command":
        assert (await ask("flow", "replay", flow.id)).out == "4 replayed: a, b, c, j\n"
    else:
        assert await (await handle_of(engine, flow)).replay() == ["a", "b", "c", "j"]
    await finish(flow)
    assert set((await flow.states()).values()) == {"completed"}


async def test_a_cancelled_flow_is_replayed_whole(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, diamond())
    await flow.complete("a")
    await engine.cancel_flow(flow.id, wait=True)
    assert (await ask("flow", "replay", flow.id)).out == "3 replayed: b, c, d\n"
    assert await flow.states("b", "d") == {"b": "waiting", "d": "waiting_children"}


async def test_members_that_cannot_be_replayed_any_more_are_reported(engine: ff.Engine, ask: Any) -> None:
    policy = ExecutionPolicy(max_replay_count=0)
    flow = await submitted(engine, {"a": [], "b": ["a"]}, policy=policy)
    await flow.fail("a")
    await drain(engine)
    said = await ask("flow", "replay", flow.id, code=1)
    assert said.out == "0 replayed\n"
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["a refused", "b refused"]
    assert "max_replays_exhausted" in said.err
    answer = (await ask("flow", "replay", flow.id, "--json", code=1)).json
    assert answer["replayed"] == []
    assert [(one["node"], one["execution_id"]) for one in answer["refused"]] == [
        ("a", str(flow["a"])),
        ("b", str(flow["b"])),
    ]


# delete


async def test_delete_removes_an_ended_flow(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    said = await ask("flow", "delete", flow.id, "-y", code=1)
    assert "has members that have not ended" in said.err
    await flow.complete("a", "b")
    said = await ask("flow", "delete", flow.id, answer="n\n", code=1)
    assert f"delete flow {flow.id} (test, 2 nodes, completed)? It cannot be undone." in said.err
    assert await engine.describe_flow(flow.id) is not None
    assert "confirm with --yes" in (await ask("flow", "delete", flow.id, code=2)).err
    assert (await ask("flow", "delete", str(flow.id)[:23], answer="y\n")).out == f"{flow.id} deleted\n"
    assert await engine.describe_flow(flow.id) is None
    assert await engine.read_execution(flow["a"]) is None
    await engine.create_flow(MEGA)
    assert (await ask("flow", "delete", MEGA, "-y", "--json")).json == {"flow_id": str(MEGA), "done": "deleted"}


# Members elsewhere


async def test_show_says_what_a_member_waits_for(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": [], "c": [], "j": ["a", "b", "c"]}, {"j": Quorum(2)})
    await flow.complete("a")
    await flow.claim("b")

    async def pairs(name: str) -> tuple[str | None, str | None, str | None]:
        said = (await ask("show", flow[name], "--no-timeline")).out
        found = [re.search(rf"^{word} +(.+)$", said, re.M) for word in ("flow", "node", "waits for")]
        return tuple(one and one[1] for one in found)  # type: ignore[return-value]

    assert await pairs("j") == (f"{flow.id} test", "j", "2 of 3: b (active), c (waiting)")
    assert await pairs("b") == (f"{flow.id} test", "b", None)
    assert (await ask("show", flow["j"], "--json")).json["flow"] == {
        "flow_id": str(flow.id),
        "name": "test",
        "node": "j",
        "policy": {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"},
        "dependencies": 3,
        "waits_for": [
            {"execution_id": str(flow["b"]), "node": "b", "state": "active"},
            {"execution_id": str(flow["c"]), "node": "c", "state": "waiting"},
        ],
    }
    await flow.complete("c")
    assert await pairs("j") == (f"{flow.id} test", "j", None)
    await finish(flow)
    assert (await ask("show", flow["j"], "--json")).json["flow"]["waits_for"] == []
    alone = await submit(engine)
    assert (await ask("show", alone, "--json")).json["flow"] is None
    assert not re.search("^(flow|node) ", (await ask("show", alone)).out, re.M)


async def test_many_upstreams_are_not_all_named(plain_engine: ff.Engine, ask: Any) -> None:
    parts = [f"p{place}" for place in range(14)]
    flow = await submitted(plain_engine, {**{one: [] for one in parts}, "sum": parts})
    said = await ask("show", flow["sum"])
    assert re.search(r"^waits for +p0 \(waiting\), .*p9 \(waiting\) and 4 more$", said.out, re.M)
    await flow.fail("p3")
    await drain(plain_engine)
    assert "waits for" not in (await ask("show", flow["sum"])).out


async def test_members_are_listed_by_their_flow(engine: ff.Engine, ask: Any) -> None:
    flow = await submitted(engine, {"a": [], "b": ["a"]})
    await submitted(engine, {"c": []})
    await submit(engine)
    said = await ask("ls", "--flow", flow.id, "-q")
    assert set(said.out.split()) == {str(flow["a"]), str(flow["b"])}
    said = await ask("ls", "--flow", flow.id, "--state", "waiting", "--all", "--json")
    assert [json.loads(line)["execution_id"] for line in said.out.splitlines()] == [str(flow["a"])]


# Terminals and shells


async def test_stored_text_cannot_control_the_terminal(engine: ff.Engine, ask: Any) -> None:
    flow_id = await named(engine, EVIL, {EVIL: [], "b": [EVIL]}, namespace=EVIL)
    claimed = await engine.claim(worker_id="w", worker_instance_id="w1")
    assert claimed is not None
    await engine.fail(claimed.handle, f"bad {EVIL}", failure_class="permanent")
    members = await engine.list_flow_members(flow_id)
    for command, code in (
        (["flow", "ls"], 0),
        (["flow", "ls", "--json"], 0),
        (["flow", "ls", "--name", f"{EVIL}x"], 0),
        (["flow", "show", flow_id], 0),
        (["flow", "show", flow_id, "--json"], 0),
        (["flow", "show", EVIL], 2),
        (["flow", "export", flow_id], 0),
        (["flow", "export", flow_id, "-f", "dot"], 0),
        (["flow", "export", flow_id, "-f", "svg"], 0),
        (["flow", "wait", flow_id], 1),
        (["show", members[1].execution_id], 0),
        (["flow", "replay", flow_id], 0),
        (["flow", "cancel", flow_id, "--reason", EVIL, "-y"], 0),
        (["flow", "show", flow_id], 0),
        (["flow", "delete", flow_id], 2),
    ):
        said = await ask(*command, code=code)
        assert not set(said.out + said.err) & set("\x1b\u202e"), command


async def test_ids_and_names_of_flows_are_completed(
    engine: ff.Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.cli._completion._PATIENCE", 30)
    one = await named(engine, "etl", flow_id=MEGA)
    two = await named(engine, "export", flow_id=FlowId(UUID("bbbbbbbb-0000-4000-8000-000000000001")))
    await named(engine, "report", flow_id=FlowId(UUID("bbbbbbbb-0000-4000-8000-000000000002")))

    async def complete(line: str, dsn: str = database) -> set[str]:
        asked = {
            "_FLOWFABRIC_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            "FLOWFABRIC_DSN": dsn,
        }
        done = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, [], prog_name="flowfabric", env=asked)
        return set(done.stdout.split())

    assert await complete("flowfabric flow s") == {"show"}
    for command in ("flow show", "flow export", "flow wait", "flow cancel", "flow replay", "flow delete", "ls --flow"):
        assert await complete(f"flowfabric {command} aaaa") == {str(one)}, command
    assert await complete(f"flowfabric flow show {str(two)[:-1]}") >= {str(two)}
    assert await complete("flowfabric flow ls --name e") == {"etl", "export"}
    assert await complete("flowfabric flow cancel --policy cancel_p") == {"cancel_pending"}
    assert await complete("flowfabric flow export --format s") == {"svg"}
    assert await complete("flowfabric flow show ", dsn="") == set(), "no server is started for a completion"


async def test_a_large_flow_is_a_small_picture(plain_engine: ff.Engine, ask: Any) -> None:
    parts = [f"part[{place}]" for place in range(2000)]
    flow_id = await named(plain_engine, "large", {"first": [], **{one: ["first"] for one in parts}, "sum": parts})
    said = await ask("flow", "show", flow_id)
    assert "  blocked  2,002 nodes: 1 waiting, 2,001 waiting_children  " in said.out
    assert len(picture(said)) == 3
