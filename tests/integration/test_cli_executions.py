"""Commands that show and change executions, against a real database."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from click.testing import CliRunner

import flowfabric as ff
from flowfabric.cli import _output
from flowfabric.cli.show._page import _joined
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import FlowId, fit_partition, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.step import NewStep
from tests import sampling
from tests.ids import home, id_in
from tests.integration.test_cli import COMMAND_TREE, Answer, call, run, run_here
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import RETRY, Clock, claim_one, started, submit

TRACEBACK = """ValueError: no \x1b[31mmoney

Traceback (most recent call last):
  File "shop.py", line 1, in pay
ValueError: no \x1b[31mmoney"""


async def fail(engine: ff.Engine, reason: str = "boom", **fields: Any) -> ff.ExecutionId:
    claimed = await started(engine, **fields)
    await engine.fail(claimed.handle, reason, failure_class="permanent")
    return claimed.execution_id


def ids(said: Answer) -> list[str]:
    return said.out.split()


# ls


async def test_ls_shows_newest_first_in_plain_columns(engine: ff.Engine, database: str) -> None:
    first = await submit(engine, execution_kind="report", namespace="acme")
    second = await submit(engine, execution_kind="mail", lane_id="slow", priority=7)
    said = await call("ls", dsn=database)
    header, *lines = said.out.splitlines()
    assert header.split() == ["ID", "STATE", "LANE", "KIND", "CREATED", "TOOK", "ATTEMPT", "NAMESPACE", "PRIORITY"]
    assert [line.split()[:4] for line in lines] == [
        [str(second), "waiting", "slow", "mail"],
        [str(first), "waiting", "default", "report"],
    ]


@pytest_asyncio.fixture(loop_scope="session")
async def several(engine: ff.Engine) -> dict[str, ff.ExecutionId]:
    """One execution per way to tell it from the others."""
    return {
        "failed": await fail(engine),
        "lane": await submit(engine, lane_id="slow"),
        "kind": await submit(engine, execution_kind="mail"),
        "namespace": await submit(engine, namespace="acme"),
        "tag": await submit(engine, tags={"a.b": "c=d"}),
        "delayed": await submit(engine, delay_until=timedelta(hours=1)),
    }


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--state", "failed"], {"failed"}),
        (["--state", "failed", "-s", "delayed"], {"failed", "delayed"}),
        (["--lane", "slow"], {"lane"}),
        (["--lane", "slow", "--state", "failed"], set()),
        (["--kind", "mail"], {"kind"}),
        (["-k", "mail", "-k", "test", "--lane", "slow"], {"lane"}),
        (["--namespace", "acme"], {"namespace"}),
        (["--tag", "a.b=c=d"], {"tag"}),
        (["--since", "1h"], {"failed", "lane", "kind", "namespace", "tag", "delayed"}),
        (["--until", "1h"], set()),
        (["--since", "2099-01-01"], set()),
    ],
)
async def test_ls_filters(
    database: str, several: dict[str, ff.ExecutionId], filters: list[str], expected: set[str]
) -> None:
    found = set(ids(await call("ls", "--quiet", *filters, dsn=database)))
    assert found == {str(several[name]) for name in expected}


async def test_ls_pages_by_cursor_and_streams_everything(plain_engine: ff.Engine, database: str) -> None:
    created = await plain_engine.create_many([NewExecution(execution_kind="test") for _ in range(25)])
    expected = [str(one.execution_id) for one in created if isinstance(one, Created)]
    seen: list[str] = []
    cursor: list[str] = []
    while True:
        page = (await call("ls", "--limit", "10", "--json", *cursor, dsn=database)).json
        seen += [item["execution_id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = ["--cursor", page["next_cursor"]]
    assert sorted(seen) == sorted(expected)
    streamed = [json.loads(line) for line in (await call("ls", "--all", "--json", dsn=database)).out.splitlines()]
    assert [item["execution_id"] for item in streamed] == seen
    assert ids(await call("ls", "--all", "--quiet", dsn=database)) == seen
    short = await call("ls", "--limit", "10", dsn=database)
    assert len(short.out.splitlines()) == 11
    assert "--cursor" in short.err


async def test_ls_says_when_a_lane_does_not_exist(engine: ff.Engine, database: str) -> None:
    await submit(engine)
    said = await call("ls", "--lane", "defualt", dsn=database)
    assert said.out == ""
    assert said.err == "there is no lane defualt; did you mean default?\n"
    assert (await call("ls", "--kind", "nothing", dsn=database)).err == "no execution matches\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tag", "novalue"], "--tag"),
        (["--since", "yesterday-ish"], "--since"),
        (["--cursor", "zz"], "cursor"),
        (["--state", "wating"], "--state"),
        (["--limit", "0"], "--limit"),
        (["--lane", ""], "lane"),
    ],
)
async def test_a_bad_filter_is_refused_by_name(database: str, arguments: list[str], named: str) -> None:
    said = await call("ls", *arguments, dsn=database, code=2)
    assert named in said.err
    assert said.out == ""


async def test_json_has_iso_times_and_seconds(engine: ff.Engine, database: str) -> None:
    await submit(engine)
    (item,) = (await call("ls", "--json", dsn=database)).json["items"]
    assert item["created_at"].endswith("Z")
    assert item["public_state"] == "waiting"
    (lane,) = (await call("lanes", "--json", dsn=database)).json["lanes"]
    assert lane["oldest_age_seconds"] >= 0
    assert "oldest_age" not in lane


# show


async def test_show_tells_everything(engine: ff.Engine, clock: Clock, database: str) -> None:
    claimed = await started(
        engine, policy=RETRY, input_payload=b'{"n": 1}', tags={"a.b": "c"}, namespace="acme", priority=3
    )
    await engine.progress(claimed.handle, percent=40, message="on the \x1b[2Jway")
    await engine.renew(claimed.handle)
    await engine.renew(claimed.handle)
    await engine.record_steps(
        [
            (claimed.handle, NewStep(name="fetch", result=b'{"x": 1}', seconds=0.25)),
            (claimed.handle, NewStep(name="fetch", n=1, result=b"2")),
            (claimed.handle, NewStep(name="send", error='{"type": "OSError", "message": "no route"}')),
        ]
    )
    await engine.fail(claimed.handle, TRACEBACK)
    await clock.advance(seconds=11)
    await engine.promote_delayed(claimed.execution_id)
    again = await claim_one(engine)
    await engine.fail(again.handle, TRACEBACK, failure_class="permanent")
    said = (await call("show", claimed.execution_id, dsn=database)).out
    assert "\x1b" not in said, "text of others does not reach the terminal as it is"
    for words in (
        str(claimed.execution_id),
        "state      failed",
        "priority   3",
        "tags       a.b=c",
        "retried    once",
        "Failure (permanent)",
        '    File "shop.py", line 1, in pay',
        "initial  failed",
        "ValueError: no \\x1b[31mmoney",
        "fetch #2",
        "OSError: no route",
        '{"x": 1}',
        "250 ms",
        '  {"n": 1}',
        "lease renewed   2 times",
    ):
        assert words in said
    timeline = [line.split("  ")[-1] for line in said.split("Timeline\n")[1].splitlines()]
    assert len(timeline) >= 6

    document = (await call("show", claimed.execution_id, "--json", dsn=database)).json
    assert document["execution"]["failure_reason"] == TRACEBACK
    assert [one["attempt_index"] for one in document["attempts"]] == [0, 1]
    assert document["steps"][0]["result"] == {"x": 1}
    assert document["input"] == {"n": 1}
    assert [one["lease_type"] for one in document["events"]][:3] == ["acquired", "renewed", "renewed"]

    bare = (await call("show", claimed.execution_id, "--json", "--no-payload", "--no-timeline", dsn=database)).json
    known = {"execution", "flow", "children", "attempts", "steps", "suspension", "waitpoints", "signals", "unserved"}
    known |= {"frame_count"}
    known |= {"on_failure", "held_by", "limits"}
    assert set(bare) == known
    assert "result" not in bare["steps"][0]


async def test_show_begins_with_what_the_rows_of_the_execution_tell(
    engine: ff.Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await fail(engine, "boom", execution_kind="mail")

    async def cannot_be_read(*_: object, **__: object) -> None:
        raise ff.InvalidInput("the log cannot be read", field="log", allowed="another day")

    monkeypatch.setattr(ff.Engine, "list_events", cannot_be_read)
    given = ["show", str(target), "--dsn", database]
    said = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, given, env={"NO_COLOR": "1"})
    assert said.exit_code == 2
    assert "the log cannot be read" in said.stderr
    for words in (str(target), "mail", "state    failed", "boom", "Attempts"):
        assert words in said.stdout
    assert "Timeline" not in said.stdout


@pytest.mark.parametrize(
    ("payload", "shown"), [(b'"text"', "  text"), (b"\xff\xfe", "  <2 bytes>"), (b"plain words", "  plain words")]
)
async def test_show_prints_any_payload(engine: ff.Engine, database: str, payload: bytes, shown: str) -> None:
    execution_id = await submit(engine, input_payload=payload)
    said = (await call("show", execution_id, dsn=database)).out
    assert shown in said.split("Input\n")[1].splitlines()


STRANGE_TEXT = '"\u00e9\u202e\x9b"'.encode()
AS_PROCESSES = (rb'"\ud800"', STRANGE_TEXT)  # the others are shown by the same program in this process


@pytest.mark.parametrize(
    ("payload", "shown", "in_json"),
    [
        (rb'"\ud800"', r"\ud800", r'"\ud800"'),  # half of a surrogate pair has no UTF-8: its JSON is shown as text
        (rb'{"\udfff": ["\ud800"]}', r'{"\udfff": ["\ud800"]}', r'{"\udfff": ["\ud800"]}'),
        (b"[" * 5000, "[" * 5000, "[" * 5000),
        (b"[" * 600 + b"]" * 600, "[" * 600 + "]" * 600, "[" * 600 + "]" * 600),
        (b"[" * 40 + b"]" * 40, "[" * 40 + "]" * 40, json.loads("[" * 40 + "]" * 40)),
        (b"NaN", "NaN", "NaN"),
        (b"[1e400]", "[1e400]", "[1e400]"),
        (b"1" * 5000, "1" * 5000, "1" * 5000),
        (STRANGE_TEXT, r"\xe9\u202e\x9b", "\u00e9\u202e\x9b"),
    ],
    ids=lambda value: ascii(value)[:20],
)
async def test_no_payload_is_too_strange_to_be_shown(
    engine: ff.Engine, database: str, payload: bytes, shown: str, in_json: object
) -> None:
    claimed = await started(engine, input_payload=payload)
    await engine.record_steps([(claimed.handle, NewStep(name="s", result=payload))])
    await engine.complete(claimed.handle, payload)

    async def program(*arguments: object, encoding: str) -> subprocess.CompletedProcess[str]:
        if sampling.is_full() or (payload in AS_PROCESSES and arguments[0] == "show"):
            return await asyncio.to_thread(run, *arguments, PYTHONIOENCODING=encoding)
        return await asyncio.to_thread(run_here, *arguments, encoding=encoding)

    for command in ("show", "wait"):
        said = await program(command, claimed.execution_id, "--dsn", database, encoding="ascii")
        assert (said.returncode, said.stderr) == (0, "")
        assert (shown[:1000] if command == "show" else shown) in said.stdout
        for encoding in ("ascii", "utf-8"):
            said = await program(command, claimed.execution_id, "--json", "--dsn", database, encoding=encoding)
            assert (said.returncode, said.stderr) == (0, "")
            assert not set(said.stdout) & set("\u202e\x9b")
            document = json.loads(said.stdout, parse_constant=pytest.fail)
            assert document["result"] == in_json
            assert document.get("input", in_json) == in_json


async def test_show_says_how_the_attempts_and_open_steps_of_a_cancelled_execution_ended(
    engine: ff.Engine, database: str
) -> None:
    held = await started(engine)
    await engine.record_steps(
        [
            (held.handle, NewStep(name="sleep", kind="sleep", pause=timedelta(hours=1))),
            (held.handle, NewStep(name="way", kind="patch")),
            (held.handle, NewStep(name="other way", kind="patch", result=b"old")),
        ]
    )
    steps = (await call("show", held.execution_id, dsn=database)).out.split("Steps\n")[1].splitlines()
    assert [line.split()[2] for line in steps if line.startswith("sleep ")] == ["sleeping"]
    assert [line.split()[-1] for line in steps if line.startswith("way ")] == ["new"]
    assert [line.split()[-1] for line in steps if line.startswith("other way ")] == ["old"]
    await call("cancel", held.execution_id, dsn=database)
    said = (await call("show", held.execution_id, dsn=database)).out
    assert "cancelled by  an operator\n" in said
    (attempt,) = [line for line in said.splitlines() if line.startswith("1  initial")]
    assert attempt.endswith("  cancelled by an operator")
    assert "sleep      sleep  not over" in said
    await engine.replay_many([held.execution_id], reason="fixed", requested_by="ada")
    again = await claim_one(engine)
    await engine.complete(again.handle, b"1")
    said = (await call("show", held.execution_id, dsn=database)).out
    (attempt,) = [line for line in said.splitlines() if line.startswith("2  replay")]
    assert attempt.endswith("  completed (replayed by ada: fixed)")
    assert "branch" not in said


@pytest.mark.parametrize(
    ("ended", "why", "words"),
    [
        ("cancelled", "cancelled: cancelled by an operator", "cancelled by an operator"),
        ("cancelled", "not wanted", "cancelled: not wanted"),
        ("failed for good", "ValueError: x", "failed for good: ValueError: x"),
        ("completed", "", "completed"),
        ("", "", ""),
    ],
)
def test_how_an_attempt_ended_is_said_once(ended: str, why: str, words: str) -> None:
    assert _joined(ended, why) == words


async def test_show_names_the_task_that_tells_of_the_failure(engine: ff.Engine, database: str) -> None:
    held = await started(engine, policy={"hooks": {"failure": {"kind": "tell", "lane": "alerts"}}})
    await engine.fail(held.handle, "broken", failure_class="permanent")
    said = (await call("show", held.execution_id, dsn=database)).out
    assert "on failure  tell\n" in said
    await engine.submit_hooks()
    hook = await claim_one(engine, lane_id="alerts")
    said = (await call("show", held.execution_id, dsn=database)).out
    assert f"on failure  tell {hook.execution_id}\n" in said
    document = (await call("show", held.execution_id, "--json", dsn=database)).json
    assert document["on_failure"] == {"task": "tell", "execution_id": str(hook.execution_id)}


async def test_a_lost_lease_is_logged_without_internals(engine: ff.Engine, clock: Clock, database: str) -> None:
    held = await started(engine)
    await clock.advance(minutes=10)
    await engine.run_timers("lease")
    said = (await call("show", held.execution_id, dsn=database)).out
    (line,) = [one for one in said.splitlines() if "lease expired" in one]
    assert " of " in line
    assert "lease_expired" not in line
    await claim_one(engine)
    assert "new_lease_epoch" not in (await call("show", held.execution_id, dsn=database)).out


async def test_show_wide_prints_all_of_a_long_result(engine: ff.Engine, database: str) -> None:
    held = await started(engine, input_payload=b'"' + b"x" * 3000 + b'"')
    await engine.record_steps([(held.handle, NewStep(name="long", result=b'"' + b"y" * 200 + b'"'))])
    said = (await call("show", held.execution_id, dsn=database)).out
    assert "y" * 78 not in said
    assert "--wide` prints all" in said
    said = (await call("show", held.execution_id, "--wide", dsn=database)).out
    assert "y" * 200 in said
    assert "x" * 3000 in said


async def test_a_result_is_shown(engine: ff.Engine, database: str) -> None:
    claimed = await started(engine)
    await engine.complete(claimed.handle, b'{"ok": true}')
    assert '\nResult\n  {"ok": true}\n' in (await call("show", claimed.execution_id, dsn=database)).out


async def test_an_id_names_an_execution_wherever_it_lives(engine: ff.Engine, database: str) -> None:
    apart = id_in(9)
    for fields in ({}, {"idempotency_key": "k"}, {"idempotency_key": "k2", "execution_id": apart}):
        execution_id = await submit(engine, **fields)
        for text in (str(execution_id), str(execution_id).upper(), execution_id.hex, f"{{fp:0}}:{execution_id}"):
            document = (await call("show", text, "--json", dsn=database)).json
            assert document["execution"]["execution_id"] == str(execution_id)


async def test_the_end_of_an_id_is_enough_for_every_command(engine: ff.Engine, database: str) -> None:
    target = await submit(engine)
    end = str(target)[-8:]
    for text in (end, end[-6:], end.upper(), str(target)[-14:], target.hex[-20:]):
        assert (await call("show", text, "--json", dsn=database)).json["execution"]["execution_id"] == str(target)
    assert (await call("priority", end, "7", "--json", dsn=database)).json["execution_id"] == str(target)
    assert (await call("cancel", end, dsn=database)).out == "1 cancelled\n"
    assert (await call("replay", end, dsn=database)).out == "1 replayed\n"
    assert (await call("wait", end, "--timeout", "0", "--json", dsn=database, code=3)).json["public_state"] == "waiting"
    await call("cancel", end, dsn=database)
    await call("redact", end, "-y", dsn=database)
    await call("delete", end, "-y", dsn=database)
    assert await engine.read_execution_state(target) is None
    said = await call("show", end, dsn=database, code=1)
    assert said.err == f"flowfabric: not found: execution {end} (`flowfabric ls` lists all)\n"


async def test_what_several_ids_end_or_begin_with_lists_them(engine: ff.Engine, database: str) -> None:
    ends = [ff.ExecutionId(UUID(f"0190a000-0000-7000-8000-{n:04x}9f3c01a2")) for n in range(12)]
    made = [await submit(engine, execution_id=one) for one in ends[:2]]
    said = await call("show", "9f3c01a2", dsn=database, code=2)
    assert said.out == ""
    *lines, last = said.err.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(map(str, made))
    assert all(line.split()[1:3] == ["test", "waiting"] for line in lines)
    assert "2 executions end or begin with 9f3c01a2" in last
    assert "more of the id" in last
    assert len((await call("cancel", "0190a0", dsn=database, code=2)).err.splitlines()) == 3
    assert (await call("show", "019f3c01a2", "--json", dsn=database)).json["execution"]["execution_id"] == str(made[1])
    for one in ends[2:]:
        await submit(engine, execution_id=one)
    *lines, last = (await call("show", "9f3c01a2", dsn=database, code=2)).err.splitlines()
    assert len(lines) == 10
    assert "more than 10 executions" in last


async def test_the_beginning_of_an_id_is_enough_where_it_is_unique(engine: ff.Engine, database: str) -> None:
    target = await submit(engine, execution_id=ff.ExecutionId(UUID("abcdef01-0000-7000-8000-000000000001")))
    for text in ("abcdef", "ABCDEF01-00", "abcdef010000700"):
        assert (await call("show", text, "--json", dsn=database)).json["execution"]["execution_id"] == str(target)
    for text in ("abcde", "00001", "xyz", "abcdeg", ""):
        said = await call("show", text, dsn=database, code=2)
        assert "at least 6 hex digits" in said.err or text == "", said


async def test_the_error_for_an_unknown_id_names_the_command_that_lists_ids(engine: ff.Engine, database: str) -> None:
    unknown = str(mint_uuid())
    for command in (["show"], ["cancel"], ["replay"], ["delete", "-y"], ["redact", "-y"]):
        said = await call(*command, unknown, dsn=database, code=1)
        assert f"not found: execution {unknown} (`flowfabric ls` lists all)" in said.err, command
        assert len(said.err.splitlines()) == 1
    assert "not found" in (await call("priority", unknown, "5", dsn=database, code=1)).err
    assert (await call("show", "what", dsn=database, code=2)).err.startswith("flowfabric: ID: ")


# Parents and children

TREE = ("top", "mid", "low", "flow f", "n1: leaf")


async def _family(engine: ff.Engine) -> dict[str, Any]:
    """A parent with a task, which has a task, and a flow of one node."""
    held = await started(engine, execution_kind="top", input_payload=b'{"n":1}')
    child = await engine.submit_child(held.handle, "submit mid", 0, NewExecution(execution_kind="mid", lane_id="mid"))
    mid = await claim_one(engine, lane_id="mid")
    below = await engine.submit_child(mid.handle, "submit low", 0, NewExecution(execution_kind="low", lane_id="low"))
    flow_id = FlowId(fit_partition(mint_uuid(), home(held.execution_id), 256))
    nodes = [NewNode(name="n1", execution=NewExecution(execution_kind="leaf", lane_id="low"))]
    await engine.submit_child_flow(held.handle, "flow f", 0, nodes, flow_id=flow_id, seed=mint_uuid(), flow_kind="f")
    return {"top": held.execution_id, "mid": child.execution_id, "low": below.execution_id, "flow": flow_id}


async def test_a_family_is_shown_from_both_ends(engine: ff.Engine, database: str) -> None:
    family = await _family(engine)
    top, mid, flow = (str(family[name]) for name in ("top", "mid", "flow"))
    said = (await call("show", top, dsn=database)).out
    assert "Children" in said
    lines = [line.split() for line in said.splitlines()]
    assert [line[:4] for line in lines if line[:1] in ([mid], [flow])] == [
        [mid, "active", "task", "mid"],
        [flow, "open", "flow", "f"],
    ]
    steps = [line for line in said.splitlines() if " submit " in line]
    assert [one.split()[-1] for one in steps] == [mid, flow]
    assert f"submitted by  {top}" in (await call("show", mid, dsn=database)).out
    document = json.loads((await call("show", top, "--json", dsn=database)).out)
    assert [(one["kind"], one["id"]) for one in document["children"]] == [("execution", mid), ("flow", flow)]
    assert json.loads((await call("show", mid, "--json", dsn=database)).out)["execution"]["parent_id"] == top


async def test_ls_lists_the_children_of_one_and_the_tree_of_all(engine: ff.Engine, database: str) -> None:
    family = await _family(engine)
    assert ids(await call("ls", "--parent", str(family["top"])[-8:], "-q", dsn=database)) == [str(family["mid"])]
    said = await call("ls", "--tree", dsn=database)
    _, *lines = said.out.splitlines()
    assert [line.rstrip().removesuffix('{"n":1}').split()[-1] for line in lines[:4]] == [
        str(family[name]) for name in ("top", "mid", "low", "flow")
    ]
    assert [line[: line.index(word) + len(word)] for line, word in zip(lines, TREE, strict=True)] == [
        "top",
        "├─ mid",
        "│  └─ low",
        "└─ flow f",
        "   └─ n1: leaf",
    ]
    assert lines[0].endswith('{"n":1}')
    (root,) = json.loads((await call("ls", "--tree", "--json", dsn=database)).out)["items"]
    assert root["execution"]["execution_id"] == str(family["top"])
    assert [one["name"] for one in root["children"]] == ["mid", "f"]
    assert root["children"][0]["children"][0]["id"] == str(family["low"])
    (listed,) = json.loads((await call("ls", "--kind", "leaf", "--json", dsn=database)).out)["items"]
    assert (listed["node"], listed["parent_id"], listed["arguments"]) == ("n1", None, "")


async def test_the_state_of_a_flow_of_a_parent_is_that_of_its_members_now(engine: ff.Engine, database: str) -> None:
    family = await _family(engine)
    while (held := await claim_one(engine, lane_id="low")).execution_id == family["low"]:
        await engine.complete(held.handle)
    await engine.complete(held.handle)
    (flow,) = [one for one in await engine.list_children(family["top"]) if one.kind == "flow"]
    ended = await engine.read_execution(held.execution_id)
    assert ended is not None
    assert (flow.state, flow.completed_at) == ("completed", ended.completed_at)
    said = (await call("show", str(family["top"]), dsn=database)).out
    (line,) = [one for one in said.splitlines() if one.startswith(str(family["flow"]))]
    assert line.split()[:4] == [str(family["flow"]), "completed", "flow", "f"]
    assert len(line.split()) == 8, "created, ended"
    (line,) = [one for one in (await call("ls", "--tree", dsn=database)).out.splitlines() if "flow f" in one]
    assert " completed " in line


async def test_pages_of_trees_cut_no_tree_and_leave_none_out(engine: ff.Engine, database: str) -> None:
    families = [await _family(engine) for _ in range(2)]
    tops = [str(one["top"]) for one in reversed(families)]
    first = json.loads((await call("ls", "--tree", "--limit", "1", "--json", dsn=database)).out)
    assert [one["execution"]["execution_id"] for one in first["items"]] == tops[:1]
    more = ["--cursor", first["next_cursor"]]
    second = json.loads((await call("ls", "--tree", "--limit", "1", "--json", *more, dsn=database)).out)
    assert [one["execution"]["execution_id"] for one in second["items"]] == tops[1:]
    assert [one["name"] for one in second["items"][0]["children"]] == ["mid", "f"]
    # What a filter finds is the top of a tree.
    (mid,) = json.loads((await call("ls", "--tree", "--parent", tops[0], "--json", dsn=database)).out)["items"]
    assert mid["execution"]["execution_kind"] == "mid"
    assert [one["name"] for one in mid["children"]] == ["low"]


async def test_a_watched_tree_is_a_tree(engine: ff.Engine, database: str) -> None:
    family = await _family(engine)
    watching = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "flowfabric.cli", "ls", "--tree", "--watch", "--dsn", database,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert watching.stdout is not None
    lines = [(await watching.stdout.readline()).decode() for _ in range(6)]
    watching.terminate()
    await watching.wait()
    assert lines[0].split() == ["NAME", "STATE", "ID", "ARGUMENTS"]
    assert lines[1].split()[:3] == ["top", "active", str(family["top"])]
    assert lines[3].startswith("│  └─ low")


async def test_the_nodes_of_a_tree_are_in_the_order_of_their_names_with_their_arguments(
    engine: ff.Engine, database: str
) -> None:
    held = await started(engine, execution_kind="top")
    flow_id = FlowId(fit_partition(mint_uuid(), home(held.execution_id), 256))
    names = ["scan-10", "scan-2", "scan"]
    nodes = [
        NewNode(name=name, execution=NewExecution(execution_kind="scan", lane_id="low", input_payload=b'{"at":1}'))
        for name in names
    ]
    await engine.submit_child_flow(held.handle, "flow f", 0, nodes, flow_id=flow_id, seed=mint_uuid(), flow_kind="f")
    lines = (await call("ls", "--tree", dsn=database)).out.splitlines()
    assert [line.split()[1] for line in lines[3:]] == ["scan:", "scan-2:", "scan-10:"]
    assert all(line.endswith('{"at":1}') for line in lines[3:])


async def test_cancel_takes_the_children_with_it_unless_told_otherwise(engine: ff.Engine, database: str) -> None:
    for keeps in (True, False):
        family = await _family(engine)
        extra = ["--keep-children"] if keeps else []
        said = await call("cancel", str(family["top"]), "-y", *extra, dsn=database)
        assert said.out == ("1 cancelled\n" if keeps else "1 cancelled, with 3 children\n")
        states = [await engine.read_execution_state(family[name]) for name in ("top", "mid", "low")]
        expected = ["cancelled", "active", "waiting"] if keeps else ["cancelled"] * 3
        assert states == expected
        for name in ("mid", "low"):
            await engine.cancel(Operator(family[name]), "enough")
        await engine.cancel_flow(family["flow"], wait=True)
        while (await engine.cancel_children()).parent_id is not None:
            pass


async def test_a_failed_child_is_replayed_before_its_parent(engine: ff.Engine, database: str) -> None:
    held = await started(engine, execution_kind="top")
    submitted = await engine.submit_child(
        held.handle, "submit mid", 0, NewExecution(execution_kind="mid", lane_id="mid")
    )
    mid = await claim_one(engine, lane_id="mid")
    for one in (mid, held):
        await engine.fail(one.handle, "broken", failure_class="permanent", category="error")
    top, child = str(held.execution_id), str(submitted.execution_id)
    said = await call("replay", top, dsn=database, answer="n\n", code=1)
    assert said.err.startswith(
        f"its child mid failed: `flowfabric replay {child}` runs it again\na child failed and stays"
    )
    assert await engine.read_execution_state(held.execution_id) is ff.State.FAILED
    assert (await call("replay", top, child, dsn=database)).out == "2 replayed\n"
    await engine.cancel(Operator(submitted.execution_id), "enough")
    await engine.cancel(Operator(held.execution_id), "enough")
    assert (await call("replay", top, dsn=database)).out == "1 replayed\n"


async def test_delete_says_who_needs_a_child(engine: ff.Engine, database: str) -> None:
    family = await _family(engine)
    await engine.cancel(Operator(family["low"]), "enough")
    said = await call("delete", str(family["low"]), "-y", dsn=database, code=1)
    assert f"needed by {family['mid']} (active)" in said.err


# cancel, replay


async def test_named_executions_are_cancelled(engine: ff.Engine, database: str) -> None:
    one, two, three = [await submit(engine) for _ in range(3)]
    said = await call("cancel", one, str(two), "--reason", "not wanted", dsn=database)
    assert said.out == "2 cancelled\n"
    execution = await engine.read_execution(two)
    assert execution is not None
    assert (execution.public_state, execution.cancellation_reason) == (ff.State.CANCELLED, "not wanted")
    assert await engine.read_execution_state(three) is ff.State.WAITING


async def test_an_ended_execution_cannot_be_cancelled(engine: ff.Engine, database: str) -> None:
    execution_id = await fail(engine)
    said = await call("cancel", execution_id, dsn=database, code=1)
    assert said.err.endswith(": it has ended already (failed)\n")
    other = await submit(engine)
    answer = (await call("cancel", execution_id, other, "--json", dsn=database, code=1)).json
    assert answer["cancelled"] == 1
    assert [one["execution_id"] for one in answer["refused"]] == [str(execution_id)]


@pytest.mark.parametrize("command", ["cancel", "replay"])
async def test_either_ids_or_a_filter(engine: ff.Engine, database: str, command: str) -> None:
    execution_id = await submit(engine)
    assert f"say what to {command}: ids, or a filter" in (await call(command, dsn=database, code=2)).err
    assert "not both" in (await call(command, execution_id, "--kind", "test", dsn=database, code=2)).err
    assert await engine.read_execution_state(execution_id) is ff.State.WAITING


async def test_all_that_match_are_cancelled_in_chunks(plain_engine: ff.Engine, database: str) -> None:
    for _ in range(2):
        await plain_engine.create_many([NewExecution(execution_kind="much") for _ in range(600)])
    kept = await submit(plain_engine, execution_kind="other")
    said = await call("cancel", "--kind", "much", dsn=database, answer="", code=2)
    assert "cancel 1,200 executions?" in said.err
    assert "--yes" in said.err
    assert (await call("cancel", "--kind", "much", dsn=database, answer="n\n", code=1)).out == ""
    assert len(ids(await call("ls", "-q", "--all", "--state", "waiting", dsn=database))) == 1201
    assert (await call("cancel", "--kind", "much", "--yes", dsn=database)).out == "1200 cancelled\n"
    assert ids(await call("ls", "-q", "--state", "waiting", dsn=database)) == [str(kept)]
    again = await call("cancel", "--kind", "much", "--yes", dsn=database)
    assert (again.out, again.err) == ("0 cancelled\n", "no execution matches\n")


async def test_all_that_failed_are_replayed(engine: ff.Engine, database: str) -> None:
    failed = [await fail(engine) for _ in range(3)]
    claimed = await started(engine)
    await engine.complete(claimed.handle, b"1")
    answer = (await call("replay", "--kind", "test", "-y", "-r", "fixed", "--json", dsn=database)).json
    assert answer == {"replayed": 3, "refused": []}
    for execution_id in failed:
        assert await engine.read_execution_state(execution_id) is ff.State.WAITING
    assert await engine.read_execution_state(claimed.execution_id) is ff.State.COMPLETED, "a success is not repeated"
    again = await claim_one(engine)
    attempts = await engine.list_attempts(again.execution_id)
    assert attempts[-1].replay_reason == "fixed"
    assert attempts[-1].replay_requested_by


async def test_a_cancelled_execution_is_replayed_only_by_id_or_state(
    engine: ff.Engine, clock: Clock, database: str
) -> None:
    cancelled, expired = await submit(engine), await submit(engine, execution_deadline_at=timedelta(seconds=1))
    await engine.cancel(Operator(cancelled), "on purpose")
    await clock.advance(seconds=2)
    await engine.run_timers("deadline")
    assert await engine.read_execution_state(expired) is ff.State.EXPIRED
    assert (await call("replay", "--kind", "test", "-y", dsn=database)).out == "1 replayed\n"
    assert await engine.read_execution_state(cancelled) is ff.State.CANCELLED
    assert (await call("replay", "--kind", "test", "--state", "cancelled", "-y", dsn=database)).out == "1 replayed\n"
    assert await engine.read_execution_state(cancelled) is ff.State.WAITING


async def test_a_running_execution_cannot_be_replayed(engine: ff.Engine, database: str) -> None:
    claimed = await started(engine)
    assert "it has not ended yet" in (await call("replay", claimed.execution_id, dsn=database, code=1)).err


# fail, unblock


async def test_a_stopped_execution_is_unblocked_or_failed(engine: ff.Engine, database: str) -> None:
    claimed = await started(engine)
    target = claimed.execution_id
    await engine.stop_changed(claimed.handle, detail="recorded and not asked for: step 'mail'", digest="old")
    assert (await call("unblock", target, dsn=database)).out == f"{target} unblocked\n"
    assert (await call("unblock", target, dsn=database, code=1)).err  # nothing holds it back
    claimed = await claim_one(engine)
    await engine.stop_changed(claimed.handle, detail="again", digest="old")
    answer = (await call("fail", target, "-r", "no code fits", "--json", dsn=database)).json
    assert answer == {"execution_id": str(target), "failed": True}
    found = await engine.read_execution(target)
    assert found is not None
    assert (found.public_state, found.failure_reason, found.failure_category) == ("failed", "no code fits", "operator")


async def test_a_failed_execution_is_not_retried_and_only_one_that_runs_can_be_failed(
    engine: ff.Engine, database: str
) -> None:
    waiting = await submit(engine)
    assert "it is not running" in (await call("fail", waiting, dsn=database, code=1)).err
    running = (await started(engine, policy=RETRY)).execution_id
    assert (await call("fail", running, dsn=database)).out == f"{running} failed\n"
    assert await engine.read_execution_state(running) == "failed"


# priority, delete, redact


async def test_a_priority_is_changed_and_clamped(engine: ff.Engine, database: str) -> None:
    execution_id = await submit(engine)
    assert (await call("priority", execution_id, "12", dsn=database)).out == f"{execution_id} has priority 12\n"
    answer = (await call("priority", str(execution_id), "99999", "--json", dsn=database)).json
    assert answer == {"execution_id": str(execution_id), "priority": 9000}
    assert (await claim_one(engine)).priority == 9000
    assert (await call("priority", execution_id, "1", dsn=database, code=1)).err


async def test_an_ended_execution_is_redacted_and_deleted(engine: ff.Engine, database: str) -> None:
    execution_id = await fail(engine, "the secret of Mr. X", input_payload=b'"Mr. X"')
    assert "cannot be undone" in (await call("redact", execution_id, dsn=database, answer="n\n", code=1)).err
    assert "Mr. X" in (await call("show", execution_id, dsn=database)).out
    assert (await call("redact", execution_id, "--yes", dsn=database)).out == f"{execution_id} redacted\n"
    assert "Mr. X" not in (await call("show", execution_id, dsn=database)).out
    assert (await call("delete", execution_id, dsn=database, answer="y\n")).out == f"{execution_id} deleted\n"
    assert await engine.read_execution(execution_id) is None


@pytest.mark.parametrize("command", ["delete", "redact"])
async def test_an_unfinished_execution_is_kept(engine: ff.Engine, database: str, command: str) -> None:
    execution_id = await submit(engine, input_payload=b"1")
    assert "it has not ended yet" in (await call(command, execution_id, "-y", dsn=database, code=1)).err
    assert (await engine.read_execution_context(execution_id)).input_payload == b"1"


# lanes


async def test_lanes_are_shown(engine: ff.Engine, database: str) -> None:
    await started(engine)
    await submit(engine, lane_id="slow")
    await submit(engine, lane_id="slow", delay_until=timedelta(hours=1))
    header, *lines = (await call("lanes", dsn=database)).out.splitlines()
    assert header.split() == ["LANE", "STATE", "READY", "OLDEST", "DELAYED", "WAITING_CHILDREN", "RUNNING"]
    rows = [line.split() for line in lines]
    assert [(row[0], row[1], row[2], row[-3], row[-1]) for row in rows] == [
        ("default", "active", "0", "0", "1"),
        ("slow", "active", "1", "1", "0"),
    ]
    only = (await call("lanes", "stats", "slow", "--json", dsn=database)).json
    assert [lane["lane_id"] for lane in only["lanes"]] == ["slow"]


@pytest.mark.parametrize(
    ("verb", "state"), [("pause", "paused"), ("drain", "draining"), ("disable", "disabled"), ("resume", "active")]
)
async def test_lanes_change_their_state(engine: ff.Engine, database: str, verb: str, state: str) -> None:
    await submit(engine, lane_id="one")
    await submit(engine, lane_id="two")
    said = await call("lanes", verb, "one", "two", dsn=database)
    assert said.out.splitlines()[0].startswith(f"one is {state}")
    assert {lane.lane_id: lane.state for lane in await engine.lane_stats()} == {"one": state, "two": state}
    answer = (await call("lanes", verb, "one", "--json", dsn=database)).json
    assert answer == {"lanes": [{"lane_id": "one", "before": state, "state": state}]}


async def test_a_mistyped_lane_is_not_made(engine: ff.Engine, database: str) -> None:
    await submit(engine)
    said = await call("lanes", "pause", "default", "defalt", dsn=database, code=1)
    assert said.err == "flowfabric: not found: lane defalt (did you mean default?)\n"
    assert [(lane.lane_id, lane.state) for lane in await engine.lane_stats()] == [("default", "active")]
    assert "not found: lane nope" in (await call("lanes", "stats", "nope", dsn=database, code=1)).err


# failures


async def test_failures_are_listed_with_their_first_line(engine: ff.Engine, clock: Clock, database: str) -> None:
    one = await fail(engine, TRACEBACK)
    two = await fail(engine, "\n\nout of luck\nmore")
    expired = await submit(engine, execution_deadline_at=timedelta(seconds=5))
    cancelled = await submit(engine)
    await engine.cancel(Operator(cancelled), "because")
    await clock.advance(seconds=6)
    await engine.expire_execution(expired, "execution_deadline")
    lines = (await call("failures", dsn=database)).out.splitlines()[1:]
    found = {line.split()[0]: line for line in lines}
    assert list(found) == [str(expired), str(two), str(one)]
    assert found[str(two)].endswith("out of luck")
    assert found[str(one)].endswith("ValueError: no \\x1b[31mmoney")
    answer = (await call("failures", "--state", "cancelled", "--json", dsn=database)).json
    assert [(item["execution_id"], item["failure"]) for item in answer["items"]] == [(str(cancelled), "because")]
    assert answer["is_complete"] is True


async def test_failures_list_the_last_to_end_first(engine: ff.Engine, clock: Clock, database: str) -> None:
    made = [await submit(engine) for _ in range(3)]
    for place in (1, 2, 0):
        await clock.advance(seconds=1)
        await engine.cancel(Operator(made[place]), "no")
    lines = (await call("failures", "--state", "cancelled", dsn=database)).out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [str(made[place]) for place in (0, 2, 1)]


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        ("some.module.PaymentError: no money", "PaymentError: no money"),
        ("PaymentError", "PaymentError"),
        ("shop.errors.PaymentError", "PaymentError"),
        ("see a.b for more: x", "see a.b for more: x"),
    ],
)
def test_a_failure_is_shown_without_the_module_of_its_exception(failure: str, shown: str) -> None:
    assert _output.without_module(failure) == shown


async def test_executions_cancelled_before_are_not_counted_again(engine: ff.Engine, database: str) -> None:
    target = await submit(engine)
    said = await call("cancel", target, dsn=database)
    assert (said.out, said.err) == ("1 cancelled\n", "")
    said = await call("cancel", target, dsn=database)
    assert (said.out, said.err) == ("0 cancelled\n", "1 was cancelled before\n")
    assert (await call("cancel", target, "--json", dsn=database)).json == {
        "cancelled": 0, "unchanged": 1, "children": 0, "refused": [],
    }  # fmt: skip


async def test_show_of_a_retry_has_no_piece_of_a_traceback(engine: ff.Engine, database: str) -> None:
    held = await started(engine, policy=RETRY)
    await engine.fail(held.handle, f"Traceback (most recent call last):\n  File x\n{TRACEBACK}", category="error")
    said = (await call("show", held.execution_id, "--timeline", dsn=database)).out
    (because,) = [line for line in said.splitlines() if line.startswith("because ")]
    assert "retry at" in because and "Traceback" not in because
    assert "by backend" not in said


async def test_failures_are_counted_by_message(engine: ff.Engine, database: str) -> None:
    for _ in range(3):
        await fail(engine, "boom")
    last = await fail(engine, "bang", execution_kind="mail")
    answer = (await call("failures", "--summary", "--json", dsn=database)).json
    groups = [(group["count"], group["execution_kind"], group["message"]) for group in answer["groups"]]
    assert groups == [(3, "test", "boom"), (1, "mail", "bang")]
    assert (answer["examined"], answer["is_complete"]) == (4, True)
    said = await call("failures", "--summary", "--limit", "1", dsn=database)
    assert said.out.splitlines()[1].split()[0] == "1"
    assert said.out.splitlines()[1].endswith(str(last))
    assert "there is more" in said.err
    assert (await call("failures", "--kind", "none", dsn=database)).err == "no failures match\n"


# schedules


async def put(engine: ff.Engine, name: str) -> None:
    await engine.put_schedule(name, kind="report", timing={"cron": "0 3 * * *", "timezone": "UTC"}, next_at=None)


async def test_schedules_are_listed_paused_resumed_and_deleted(engine: ff.Engine, database: str) -> None:
    assert (await call("schedules", dsn=database)).err == "there are no schedules\n"
    await put(engine, "nightly")
    await put(engine, "weekly")
    line = (await call("schedules", dsn=database)).out.splitlines()[1]
    assert line.startswith("nightly  report  cron 0 3 * * *, UTC  ")
    assert (await call("schedules", "pause", "nightly", dsn=database)).out == "nightly is paused\n"
    listed = (await call("schedules", "list", "--json", dsn=database)).json["schedules"]
    assert [(one["name"], one["paused"]) for one in listed] == [("nightly", True), ("weekly", False)]
    assert (await call("schedules", "resume", "nightly", dsn=database)).out == "nightly is active\n"
    schedule = await engine.read_schedule("nightly")
    assert schedule is not None
    assert not schedule.paused
    assert (
        "delete schedule nightly?"
        in (await call("schedules", "delete", "nightly", dsn=database, answer="n\n", code=1)).err
    )
    assert (await call("schedules", "delete", "nightly", "-y", "--json", dsn=database)).json["state"] == "deleted"
    assert await engine.read_schedule("nightly") is None
    for verb in ("pause", "resume", "delete"):
        said = await call("schedules", verb, "weekyl", dsn=database, code=1)
        assert said.err == "flowfabric: not found: schedule weekyl (did you mean weekly?)\n"


# top


async def test_top_can_refresh_once(engine: ff.Engine, database: str) -> None:
    running = await started(engine, execution_kind="long")
    failed = await fail(engine, TRACEBACK)
    said = (await call("top", "--once", "--interval", "100ms", dsn=database)).out
    assert "per second: 0.0 claimed" in said
    assert str(running.execution_id) in said.split("Running, newest first")[1]
    assert str(failed) in said.split("Failed, newest first")[1]
    frame = (await call("top", "--once", "--interval", "100ms", "--json", dsn=database)).json
    assert frame["period_seconds"] >= 0.1
    assert [one["execution_id"] for one in frame["running"]] == [str(running.execution_id)]
    assert frame["failed"][0]["failure"] == "ValueError: no \x1b[31mmoney"


@pytest.mark.parametrize("interval", ["0", "2w", "soon"])
async def test_top_refuses_an_interval_that_makes_no_sense(database: str, interval: str) -> None:
    assert "--interval" in (await call("top", "--once", "--interval", interval, dsn=database, code=2)).err
