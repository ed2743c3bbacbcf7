"""Commands for people whom an execution waits for: waits, approve, reject, signal, resume, keys; what `show` says."""

from __future__ import annotations

import asyncio
import getpass
import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio
from click.testing import CliRunner

import flowfabric as ff
from flowfabric.contracts import json_form
from flowfabric.engine.service import migrate_database
from flowfabric.values.attempt import Claimed
from flowfabric.values.callback import parse_callback
from flowfabric.values.conditions import Condition, OperatorOnly, TimeoutOnly, named_keys, on
from flowfabric.values.ids import mint_uuid
from flowfabric.values.signal import Accepted, RecordedSignal
from flowfabric.values.wait import Fresh, Suspended, WaitpointToken
from tests.ids import home
from tests.integration.test_cli import COMMAND_TREE, Answer, call
from tests.integration.test_connection import a_role, as_user
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import Clock, claim_one, started, submit

HOUR = timedelta(hours=1)
SECRET = "5ec7e7" + "0123456789abcdef" * 3 + "0123456789"
EVIL = "k\x1b[31m\u202e"


@pytest_asyncio.fixture(loop_scope="session")
async def ask(database: str) -> Any:
    """Runs a command on this database. Whatever it says, no secret and no token is in it unless that is asked for."""

    async def asked(*arguments: object, **options: Any) -> Answer:
        said = await call(*arguments, dsn=database, **options)
        if "--token" not in arguments:
            assert not re.search("[0-9a-fA-F]{64}", said.out + said.err)
        return said

    return asked


async def token_of(engine: ff.Engine, target: ff.ExecutionId, waitpoint: Any) -> WaitpointToken | None:
    return await engine.read_waitpoint_token(home(UUID(str(target))), waitpoint)


async def suspend(
    engine: ff.Engine, condition: Condition | None = None, *, of: Claimed | None = None, **args: Any
) -> Any:
    """An execution suspended on what the condition names."""
    wanted = on("k") if condition is None else condition
    creating = {name: args.pop(name) for name in ("lane_id", "namespace", "execution_kind") if name in args}
    if of is None:
        await submit(engine, **creating)
        of = await claim_one(engine, lane_id=creating.get("lane_id", "default"))
    keys = args.pop("keys", None) or named_keys(wanted) or ["k"]
    answer = await engine.suspend(
        of.handle, waitpoints=[Fresh(mint_uuid(), key) for key in keys], resume_condition=wanted, **args
    )
    assert isinstance(answer, Suspended)
    return str(of.execution_id)


async def received(engine: ff.Engine, target: ff.ExecutionId) -> list[RecordedSignal]:
    return list((await engine.read_signals(target)).items)


def rows(said: Answer) -> list[dict[str, str]]:
    """The lines of a table in a pipe, by the names of the columns: they begin where their names do."""
    header, *lines = said.out.splitlines()
    names = header.split()
    starts = [header.index(f"{name} ") if name != names[-1] else header.rindex(name) for name in names]
    ends = [*starts[1:], None]
    return [
        {name: line[start:end].strip() for name, start, end in zip(names, starts, ends, strict=True)} for line in lines
    ]


# waits


async def test_waits_show_condition_deadline_and_timeout_behaviour(engine: ff.Engine, clock: Clock, ask: Any) -> None:
    deadline = await clock.now() + HOUR
    first = await suspend(
        engine, ff.from_sources(2, "approval", name="yes"), execution_kind="deploy", reason_code="waiting_for_approval",
        timeout_at=deadline, timeout_behavior="cancel",
    )  # fmt: skip
    await engine.deliver_approval_signal(
        first, "default", (await engine.list_waits()).items[0].waitpoint_id, signal_name="yes", idempotency_suffix="1"
    )
    second = await suspend(engine, ff.any_of("a", "b"), lane_id="slow")
    third = await started(engine)
    await engine.create_waitpoint(third.handle, "later", HOUR)
    found = rows(await ask("waits"))
    fields = ("ID", "TASK", "LANE", "KEY", "FOR", "THEN", "SIGNALS", "NAMES")
    assert [tuple(row[name] for name in fields) for row in found] == [
        (first, "deploy", "default", "approval", "approval", "cancel", "1", "yes"),
        (second, "test", "slow", "a", "signal", "", "0", "any"),
        (second, "test", "slow", "b", "signal", "", "0", "any"),
        (str(third.execution_id), "test", "default", "later", "pending", "close", "0", ""),
    ]
    assert found[0]["DEADLINE"] == f"{deadline.astimezone():%Y-%m-%d %H:%M:%S}"
    assert found[1]["DEADLINE"] == ""
    assert found[0]["SINCE"]
    document = (await ask("waits", "--json")).json
    assert document["next_cursor"] is None
    assert document["items"][0] == {
        "execution_id": first,
        "execution_kind": "deploy",
        "lane_id": "default",
        "namespace": "",
        "waitpoint_id": document["items"][0]["waitpoint_id"],
        "waitpoint_key": "approval",
        "state": "active",
        "reason": "waiting_for_approval",
        "since": document["items"][0]["since"],
        "timeout_at": json_form.instant(deadline),
        "timeout_behavior": "cancel",
        "required_signal_names": ["yes"],
        "signal_count": 1,
        "refused_signal_count": 0,
    }


@pytest.mark.parametrize(
    ("behavior", "then"),
    [
        ("fail", "fail"),
        ("cancel", "cancel"),
        ("expire", "expire"),
        ("escalate", "escalate"),
        ("auto_resume_with_timeout_signal", "time out"),
    ],
)
async def test_what_happens_at_the_deadline_is_one_word(
    engine: ff.Engine, clock: Clock, ask: Any, behavior: Any, then: str
) -> None:
    target = await suspend(engine, timeout_at=await clock.now() + HOUR, timeout_behavior=behavior)
    assert rows(await ask("waits"))[0]["THEN"] == then
    words = "the wait times out (NoSignal, or its default)" if then == "time out" else then
    assert f", then {words}\n" in (await ask("show", target)).out


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], {"plain", "lane", "namespace", "key"}),
        (["--lane", "slow"], {"lane"}),
        (["-l", "default", "--key", "k"], {"plain", "namespace"}),
        (["--namespace", "acme"], {"namespace"}),
        (["--key", "other"], {"key"}),
        (["--key", "none"], set()),
    ],
)
async def test_waits_are_filtered(engine: ff.Engine, ask: Any, filters: list[str], expected: set[str]) -> None:
    there = {
        "plain": await suspend(engine),
        "lane": await suspend(engine, lane_id="slow"),
        "namespace": await suspend(engine, namespace="acme"),
        "key": await suspend(engine, on("other")),
    }
    items = (await ask("waits", "--json", *filters)).json["items"]
    assert {item["execution_id"] for item in items} == {there[name] for name in expected}


async def test_waits_say_when_there_is_more_and_go_on(plain_engine: ff.Engine, database: str) -> None:
    there = [await suspend(plain_engine, ff.any_of("a", "b", "c")) for _ in range(3)]
    said = await call("waits", "--limit", "4", dsn=database)
    assert len(said.out.splitlines()) == 5
    assert said.err.startswith("there is more: --limit, or --cursor ")
    cursor = said.err.split()[-1]
    rest = await call("waits", "--cursor", cursor, "--json", dsn=database)
    assert [item["execution_id"] for item in rest.json["items"]] == [there[1], there[1], there[2], there[2], there[2]]
    exactly = await call("waits", "--limit", "9", dsn=database)
    assert (len(exactly.out.splitlines()), exactly.err) == (10, "")


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7])
async def test_a_limit_over_several_pages_is_kept(
    plain_engine: ff.Engine, database: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.cli._pages.PAGE", 2)
    await suspend(plain_engine, ff.any_of("a", "b", "c", "d", "e"))
    document = (await call("waits", "--limit", str(limit), "--json", dsn=database)).json
    assert len(document["items"]) == min(limit, 5)
    assert (document["next_cursor"] is not None) == (limit < 5)


async def test_no_waits_and_no_such_lane_are_different_messages(engine: ff.Engine, ask: Any) -> None:
    await submit(engine)
    assert (await ask("waits")).err == "no execution waits for a signal\n"
    assert (await ask("waits", "--lane", "defualt")).err == "there is no lane defualt; did you mean default?\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["waits", "--cursor", "zz"], "cursor"),
        (["waits", "--limit", "0"], "--limit"),
        (["waits", "--token", "what"], "ID"),
        (["waits", "--token", "what", "--lane", "x"], "--token"),
        (["approve", "what"], "ID"),
        (["signal", "x", "--payload", "{"], "--payload"),
        (["signal", "x", "--payload", "words"], """a string is '"text"'"""),
        (["signal", "x", "--payload", "NaN"], "--payload"),
        (["signal", "x", "--payload", "@/nowhere/at/all"], "No such file"),
        (["approve", "x", "--by", ""], "--by"),
        (["resume", "x", "--delay", "soon"], "--delay"),
        (["keys", "rotate", "-y", "--grace", "soon"], "--grace"),
        (["keys", "rotate", "-y", "--kid", "with space"], "kid"),
        (["keys", "rotate", "-y", "--secret-file", "/nowhere/at/all"], "No such file"),
        (["keys", "rotate", "-y", "--secret-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["keys", "rotate", "-y", "--secret-env", "A", "--secret-file", "b"], "--secret-env"),
    ],
)
async def test_a_bad_argument_is_refused_by_name(database: str, arguments: list[str], named: str) -> None:
    said = await call(*arguments, dsn=database, code=2)
    assert named in said.err
    assert said.out == ""
    if "--limit" not in arguments:
        assert len(said.err.splitlines()) == 1


# Tokens


async def test_a_token_is_printed_where_it_is_asked_for_and_nowhere_else(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, ff.any_of("a", "b"))
    waitpoint = {one.waitpoint_key: one.waitpoint_id for one in (await engine.list_waits()).items}["b"]
    token = await token_of(engine, target, waitpoint)
    assert token is not None
    document = (await ask("waits", "--token", target, "--key", "b", "--json")).json
    assert {name: document[name] for name in ("execution_id", "waitpoint_id", "token")} == {
        "execution_id": target,
        "waitpoint_id": str(waitpoint),
        "token": token.reveal(),
    }
    assert parse_callback(document["callback"]).token == token
    said = await ask("waits", "--token", str(target), "--key", "b")
    assert token.reveal() in said.out
    assert document["callback"] in said.out
    assert "keep them out of logs" in said.err
    assert "--key" in (await ask("waits", "--token", target, code=2)).err
    for command in (["waits"], ["waits", "--json"], ["show", target], ["show", target, "--json"]):
        await ask(*command)  # which looks for tokens in what is said


async def test_every_command_about_waits_keeps_tokens_to_itself(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, ff.from_sources(9, "k"))
    for command in (
        ["approve", target, "--by", "a"],
        ["reject", target, "--by", "a", "--json"],
        ["signal", target, "--by", "b"],
        ["signal", target, "--key", "nope"],
        ["keys"],
    ):
        await ask(*command, code=1 if "nope" in command else 0)


# approve, reject, signal


@pytest.mark.parametrize(("verb", "name"), [("approve", "approved"), ("reject", "rejected")])
async def test_a_decision_resumes_the_execution_that_waits_for_it(
    engine: ff.Engine, ask: Any, verb: str, name: str
) -> None:
    target = await suspend(engine)
    assert (await ask(verb, target, "--by", "alice")).out == f"{name}; {target} resumes\n"
    assert await engine.read_execution_state(target) is ff.State.RESUMABLE
    (signal,) = await received(engine, target)
    assert (signal.signal_name, signal.source_type, signal.source_identity) == (name, "operator", "alice")
    other = await suspend(engine, on("x"), of=await started(engine, priority=9))
    document = (await ask(verb, str(other), "--key", "x", "--json")).json
    assert document == {
        "execution_id": other,
        "signal_name": name,
        "signal_id": document["signal_id"],
        "effect": "resume_condition_satisfied",
        "match_detail": "advanced",
    }
    (signal,) = await received(engine, other)
    assert signal.source_identity == getpass.getuser(), "the login name"


async def asking(engine: ff.Engine, *keys: str) -> ff.ExecutionId:
    """A task that waits for an object at each of these keys, each in a wait of its own."""
    held = await started(engine)
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
    waits = [await engine.open_wait(held.handle, key, 0, [key], None, schema) for key in keys]
    points = {one.waitpoints[0].waitpoint_id: 0 for one in waits}
    if len(keys) == 1:
        await engine.suspend_on(held.handle, list(points), on(keys[0]))
    else:
        await engine.park(held.handle, signals_on=points)
    return held.execution_id


async def test_an_answer_that_does_not_fit_is_refused_with_the_field(
    engine: ff.Engine, ask: Any, tmp_path: Path
) -> None:
    target = str(await asking(engine, "k"))
    for command, words in (
        (["approve"], "payload: got nothing; allowed: an object"),
        (["approve", "--payload", '{"ok": "hunter2"}'], "payload.ok: got text; allowed: true or false"),
        (["reject", "--reason", "too late"], "payload.ok: missing; allowed: true or false"),
        (["signal", "--payload", "[]"], "payload: got a list of 0; allowed: an object"),
    ):
        verb, *options = command
        said = await ask(verb, target, *options, code=2)
        assert words in said.err
        assert "hunter2" not in said.err
    said = await ask("reject", target, "--payload", "5", "--reason", "x", code=2)
    assert "--reason: given with a payload" in said.err
    assert await received(engine, target) == []
    (tmp_path / "answer.json").write_text('{"ok": false}')
    options = ["--payload", f"@{tmp_path / 'answer.json'}", "--reason", "too late"]
    assert (await ask("reject", target, *options)).out == f"rejected; {target} resumes\n"
    (signal,) = await received(engine, target)
    assert json.loads(signal.payload or b"") == {"ok": False, "reason": "too late"}


async def test_the_nodes_that_an_execution_still_waits_for_are_shown(engine: ff.Engine, ask: Any) -> None:
    target = str(await asking(engine, "a", "b", "c"))
    said = await ask("approve", target, "--key", "a", "--payload", '{"ok": true}')
    assert said.out == f"approved; {target} continues, and still takes signals at b, c\n"


async def test_refused_answers_are_shown(engine: ff.Engine, ask: Any) -> None:
    target = await asking(engine, "k")
    sent = await engine.signal_execution(target, "k", signal_name="go", source_type="sql", payload=b'"hunter2"')
    assert isinstance(sent, Accepted)
    held = await claim_one(engine)
    await engine.refuse_signals(held.handle, "k", 0, {sent.signal_id: "does not fit Decision"})
    assert rows(await ask("waits"))[0]["SIGNALS"] == "1 (1 refused)"
    shown = (await ask("show", str(target), "--timeline")).out
    assert "refused: does not fit Decision" in shown
    assert "1 (1 refused)" in shown
    assert "go at k from sql: refused" in shown
    document = (await ask("show", str(target), "--json")).json
    assert document["signals"][0]["refused"] == "does not fit Decision"
    assert (await ask("waits", "--json")).json["items"][0]["refused_signal_count"] == 1


async def test_two_different_people_are_needed_and_one_does_not_count_twice(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, ff.from_sources(2, "approval"))
    said = await ask("approve", target, "--by", "alice")
    assert said.out == f"approved; {target} still waits\n"
    assert said.err == "it waits for signals from 2 different senders at approval\n"
    assert (await ask("approve", target, "--by", "alice")).out == f"{target} has this signal already; nothing changed\n"
    assert (await ask("approve", target, "--by", "alice", "--json")).json["effect"] == "deduped"
    said = await ask("signal", target, "--by", "alice")
    assert said.err.startswith("it counts once with the earlier signal: ")
    assert await engine.read_execution_state(target) is ff.State.SUSPENDED
    assert (await ask("signal", target, "--by", "bob")).out == f"signalled; {target} resumes\n"


async def test_a_signal_of_another_name_says_what_is_waited_for(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, on("deploy", "deploy_approval"))
    said = await ask("approve", target)
    assert said.out == f"approved; {target} still waits\n"
    expected = "a signal approved does not resume it: it waits for signal deploy_approval at deploy\n"
    assert said.err == expected
    assert (await ask("signal", target, "--name", "deploy_approval")).out == f"signalled; {target} resumes\n"


async def test_a_signal_that_comes_early_is_kept(engine: ff.Engine, ask: Any) -> None:
    claimed = await started(engine)
    await engine.create_waitpoint(claimed.handle, "later", HOUR)
    assert (
        await ask("signal", claimed.execution_id)
    ).out == f"signalled; {claimed.execution_id} gets it when it waits there\n"


@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        ('{"n": [1, 2.5, null]}', {"n": [1, 2.5, None]}),
        ('"text"', "text"),
        ("7", 7),
        ("@file", {"from": "a file"}),
        ("-", ["from", "standard input"]),
    ],
)
async def test_a_payload_is_json_from_the_command_line_a_file_or_a_pipe(
    engine: ff.Engine, ask: Any, tmp_path: Path, payload: str, stored: object
) -> None:
    target = await suspend(engine)
    if payload == "@file":
        (tmp_path / "p.json").write_text(json.dumps(stored) + "\n")
        payload = f"@{tmp_path / 'p.json'}"
    await ask("signal", target, "--name", "go", "--payload", payload, answer=json.dumps(stored))
    (signal,) = await received(engine, target)
    assert signal.payload is not None
    assert (json.loads(signal.payload), signal.payload_encoding) == (stored, "json")


async def test_a_signal_without_a_payload_has_none(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine)
    await ask("signal", target)
    (signal,) = await received(engine, target)
    assert (signal.signal_name, signal.payload) == ("signal", None)


@pytest.mark.parametrize("size", [65_535, 300_000])
async def test_a_payload_that_is_too_large_is_refused(engine: ff.Engine, ask: Any, tmp_path: Path, size: int) -> None:
    target = await suspend(engine)
    place = tmp_path / "p.json"
    place.write_text(json.dumps("x" * size))
    assert "payload_too_large" in (await ask("signal", target, "--payload", f"@{place}", code=2)).err
    assert await received(engine, target) == []
    place.write_text(json.dumps("x" * 65_534))
    await ask("signal", target, "--payload", f"@{place}")


async def test_an_idempotency_key_is_taken_once(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, ff.count_signals(3, "k"))
    for expected in ("still waits", "nothing changed"):
        said = await ask("signal", target, "--idempotency-key", "order-7", "--by", expected.replace(" ", ""))
        assert expected in said.out
    assert len(await received(engine, target)) == 1


async def test_payloads_are_sealed_as_the_app_seals(
    engine: ff.Engine, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sealed_waits.py").write_text(
        "import flowfabric as ff\n\n"
        "class Turn:\n"
        "    name = 'turn'\n"
        "    def encode(self, data): return data[::-1]\n"
        "    decode = encode\n\n"
        "app = ff.App(codecs=[Turn()])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = await suspend(engine)
    await ask("signal", target, "--payload", '"secret"', "--app", "sealed_waits:app")
    (signal,) = await received(engine, target)
    assert (signal.payload, signal.payload_encoding) == (b'"terces"', "json+turn")
    assert '"terces"' in (await ask("show", target)).out
    document = (await ask("show", target, "--json", "--app", "sealed_waits:app")).json
    assert document["signals"][0]["payload"] == "secret"


# Refusals


async def test_for_an_unknown_key_the_error_lists_the_keys(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, ff.any_of("apples", "pears"))
    for command in (["approve"], ["reject"], ["signal"], ["waits", "--token"]):
        said = await ask(*command, target, "--key", "aples", code=1)
        assert said.err == f"flowfabric: not found: waitpoint aples ({target} has apples, pears)\n"
        said = await ask(*command, target, code=2)
        assert said.err == "flowfabric: --key: the execution waits at 2 waitpoints; allowed: apples, pears\n"
    assert await received(engine, target) == []


@pytest.mark.parametrize("command", [["approve"], ["reject"], ["signal"], ["waits", "--token"], ["resume"]])
async def test_for_an_execution_that_does_not_wait_the_error_names_its_state(
    engine: ff.Engine, ask: Any, command: list[str]
) -> None:
    target = await submit(engine)
    said = await ask(*command, target, code=1)
    why = ", so there is no wait to end" if command == ["resume"] else " and waits for no signal"
    assert said.err == f"flowfabric: {target} is waiting{why}\n"
    assert len(said.err.splitlines()) == 1
    claimed = await claim_one(engine)
    assert f"{target} is active" in (await ask(*command, target, code=1)).err
    await engine.complete(claimed.handle, b"1")
    assert f"{target} is completed" in (await ask(*command, target, code=1)).err


async def test_for_a_late_signal_the_error_says_how_the_wait_ended(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, on("door"))
    await ask("approve", target, "--by", "alice")
    said = await ask("approve", target, "--by", "bob", code=1)
    assert f"{target} is resumable and waits for no signal; its last wait, at door, ended at " in said.err
    assert said.err.endswith("(resumed)\n")
    assert [one.source_identity for one in await received(engine, target)] == ["alice"]


@pytest.mark.parametrize("command", [["approve"], ["signal"], ["resume"], ["waits", "--token"]])
async def test_the_end_of_an_id_is_enough_and_an_unknown_one_is_not_found(
    engine: ff.Engine, ask: Any, command: list[str]
) -> None:
    target = await suspend(engine)
    assert "not found: execution" in (await ask(*command, mint_uuid(), code=1)).err
    assert str(target) in (await ask(*command, str(target)[-8:])).out


async def test_an_execution_can_be_resumed_when_its_token_key_expired(
    engine: ff.Engine, clock: Clock, ask: Any
) -> None:
    target = await suspend(engine, ff.count_signals(4, "k"))
    await ask("keys", "rotate", "--grace", "1h", "-y")
    await ask("signal", target)
    await clock.advance(hours=2)
    for rotations in range(2):  # of a key whose grace is over, then of one whose secret is erased
        assert (await ask("signal", target)).out == f"signalled; {target} still waits\n"
        if rotations == 0:
            await ask("keys", "rotate", "-y")
    assert (await ask("approve", target)).out == f"approved; {target} resumes\n"


# resume


async def test_an_operator_resumes_any_wait(engine: ff.Engine, clock: Clock, ask: Any) -> None:
    target = await suspend(engine, OperatorOnly())
    assert rows(await ask("waits"))[0]["NAMES"] == "none: an operator resumes it"
    said = await ask("approve", target)
    assert said.err == "no signal there resumes it: it waits for an operator who resumes it\n"
    assert (await ask("resume", target)).out == f"{target} is resumable\n"
    other = await suspend(engine, of=await started(engine, priority=9))
    assert (await ask("resume", other, "--delay", "90s")).out == f"{other} is delayed for 1 min 30 s\n"
    execution = await engine.read_execution(other)
    assert execution is not None
    assert execution.delay_until is not None
    assert timedelta(seconds=80) < execution.delay_until - await clock.now() <= timedelta(seconds=90)
    third = await suspend(engine, of=await started(engine, priority=9))
    document = (await ask("resume", third, "--json")).json
    assert document == {"execution_id": third, "public_state": "resumable"}


# keys


async def test_keys_are_listed_and_rotated_without_a_secret_in_sight(engine: ff.Engine, ask: Any) -> None:
    assert (await ask("keys")).out.split() == ["KEY", "STATE", "UNTIL", "k1", "current"]
    said = await ask("keys", "rotate", answer="n\n", code=1)
    assert "stay valid for 1 d" in said.err
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"
    said = await ask("keys", "rotate", "--grace", "2h", answer="y\n")
    kids = await engine.list_waitpoint_hmac_kids()
    assert kids.current_kid not in (None, "k1")
    assert said.out == f"{kids.current_kid} signs from now on; tokens of k1 stay valid for 2 h\n"
    assert [one.kid for one in kids.verifying] == ["k1"]
    document = (await ask("keys", "list", "--json")).json
    assert document == {
        "current_kid": kids.current_kid,
        "verifying": [{"kid": "k1", "expires_at": json_form.instant(kids.verifying[0].expires_at)}],
    }
    lines = (await ask("keys")).out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[kids.current_kid, "current"], ["k1", "verifying"]]


@pytest.mark.parametrize("way", ["file", "environment", "pipe"])
async def test_a_secret_of_ones_own_comes_from_a_file_the_environment_or_a_pipe(
    engine: ff.Engine, ask: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    monkeypatch.setenv("OUR_SECRET", SECRET)
    given = {
        "file": ["--secret-file", str(tmp_path / "secret")],
        "environment": ["--secret-env", "OUR_SECRET"],
        "pipe": ["--secret-file", "-"],
    }[way]
    said = await ask("keys", "rotate", "--kid", "ours", "-y", "--json", *given, answer=SECRET)
    assert said.json == {"kid": "ours", "is_new": True, "previous_kid": "k1"}
    assert SECRET not in said.out + said.err
    assert (await engine.seed_waitpoint_hmac_secret("ours", SECRET)).same_secret  # type: ignore[union-attr]
    said = await ask("keys", "rotate", "--kid", "ours", "-y", *given, answer=SECRET)
    assert said.out == "ours is already the current key; nothing changed\n"
    said = await ask("keys", "rotate", "--kid", "k1", "-y", *given, answer=SECRET, code=1)
    assert "was used before" in said.err
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize("content", [b"short", SECRET.encode() + b"00", b"\xff\xfe" * 32, b"g" * 64, b""])
async def test_an_invalid_secret_is_refused_and_not_repeated(
    engine: ff.Engine, ask: Any, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "secret").write_bytes(content)
    said = await ask("keys", "rotate", "-y", "--secret-file", str(tmp_path / "secret"), code=2)
    assert said.err.startswith("flowfabric: invalid_secret_hex")
    assert not content or content.decode(errors="replace") not in said.err
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"


async def test_a_secret_is_no_argument(engine: ff.Engine, database: str) -> None:
    for arguments in (["--secret", SECRET], [SECRET]):
        assert (await call("keys", "rotate", "-y", *arguments, dsn=database, code=2)).out == ""
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"


async def test_a_secret_in_a_pipe_needs_a_confirmation_option(engine: ff.Engine, ask: Any) -> None:
    assert "confirm with --yes" in (await ask("keys", "rotate", "--secret-file", "-", answer=SECRET, code=2)).err
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"


async def test_keys_are_the_owners(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as role:
        await migrate_database(database, worker_roles=(role,))
        worker = as_user(database, role)
        assert "k1" in (await call("keys", dsn=worker)).out
        said = await call("keys", "rotate", "-y", dsn=worker, code=2)
        assert "`rotate_secret` is for the owner of the schema only" in said.err
        assert len(said.err.splitlines()) == 1
        await sql.execute("delete from flowfabric.granted_role")


# show


async def test_show_lists_the_condition_and_the_signals_that_arrived(engine: ff.Engine, clock: Clock, ask: Any) -> None:
    deadline = await clock.now() + HOUR
    target = await suspend(
        engine, ff.from_sources(2, "approval", name="yes"), reason_code="waiting_for_approval", timeout_at=deadline
    )
    await ask("signal", target, "--name", "yes", "--by", "alice", "--payload", '{"why": "good"}')
    await ask("signal", target, "--name", EVIL, "--by", "mallory")
    said = (await ask("show", target)).out
    assert "\x1b" not in said
    assert "\u202e" not in said
    waits = said.split("\nWaits for\n")[1].split("\n\n")[0].splitlines()
    assert waits[0] == "condition  signals yes from 2 different senders at approval"
    assert waits[1] == "reason     approval"
    assert waits[3] == f"deadline   {deadline.astimezone():%Y-%m-%d %H:%M:%S}, then fail"
    assert waits[-1].split()[:2] == ["approval", "active"]
    assert waits[-1].split()[-2:] == ["2", "yes"]
    signals = said.split("\nSignals\n")[1].split("\n\n")[0].splitlines()
    assert signals[0].split() == ["WHEN", "NAME", "KEY", "FROM", "EFFECT", "PAYLOAD"]
    assert signals[1].split("  ", 1)[1].split() == [
        "yes", "approval", "operator", "alice", "kept", "(advanced)", '{"why":', '"good"}',
    ]  # fmt: skip
    assert signals[2].endswith("operator mallory  kept (matcher failed)")
    timeline = said.split("\nTimeline\n")[1]
    assert "suspended" in timeline
    assert "lease revoked" not in timeline
    assert "yes at approval from operator alice: kept" in timeline
    assert '{"why"' not in (await ask("show", target, "--no-payload")).out
    assert "Signals" in (await ask("show", target, "--no-payload")).out


async def test_the_json_of_show_has_suspension_waitpoints_and_signals(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine)
    document = (await ask("show", target, "--json")).json
    assert document["suspension"]["resume_condition"] == {"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}}
    assert [(one["waitpoint_key"], one["state"]) for one in document["waitpoints"]] == [("k", "active")]
    assert document["signals"] == []
    await ask("signal", target, "--payload", "[1]", "--by", "me")
    document = (await ask("show", target, "--json")).json
    assert document["waitpoints"] == []
    assert document["suspension"]["close_reason"] == "resumed"
    (signal,) = document["signals"]
    assert (signal["payload"], signal["source_identity"], signal["observed_effect"]) == (
        [1],
        "me",
        "resume_condition_satisfied",
    )
    assert [one["signal_effect"] for one in document["events"] if one["signal_effect"]] == [
        "resume_condition_satisfied"
    ]
    bare = (await ask("show", target, "--json", "--no-payload")).json
    assert "payload" not in bare["signals"][0]
    assert "Waits for" not in (await ask("show", target)).out


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (on("k"), "a signal at k"),
        (on("k", "yes"), "signal yes at k"),
        (ff.all_of("a", on("b", "yes")), "a signal at a, and signal yes at b"),
        (ff.any_of("a", "b"), "signals at 1 of a, b"),
        (ff.count_signals(3, "a", name="yes"), "3 signals yes at a"),
        (ff.from_sources(2, "a"), "signals from 2 different senders at a"),
        (OperatorOnly(), "an operator who resumes it"),
        (TimeoutOnly(), "its deadline"),
    ],
)
async def test_every_condition_has_words(
    engine: ff.Engine, clock: Clock, ask: Any, condition: Condition, words: str
) -> None:
    target = await suspend(engine, condition, timeout_at=await clock.now() + HOUR)
    assert f"\ncondition  {words}\n" in (await ask("show", target)).out


async def test_a_repeated_a_timed_out_and_an_operators_end_are_in_the_timeline(
    engine: ff.Engine, clock: Clock, ask: Any
) -> None:
    target = await suspend(engine, ff.count_signals(2, "k"))
    for _ in range(2):
        await ask("signal", target, "--idempotency-key", "x")
    await ask("resume", target)
    timeline = (await ask("show", target)).out.split("\nTimeline\n")[1].splitlines()
    words = [" ".join(line.split()[2:]) for line in timeline[1:]]
    assert any("signal signal at k from operator" in line and line.endswith("repeated") for line in words)
    assert any("resumed trigger_type operator" in line for line in words)
    other = await suspend(
        engine, of=await started(engine, priority=9), timeout_at=await clock.now() + HOUR, timeout_behavior="escalate"
    )
    await clock.advance(hours=2)
    await engine.expire_suspension(other)
    said = (await ask("show", other)).out
    assert "suspension escalated" in said
    assert "reason     operator review" in said
    assert "deadline" not in said.split("\nWaits for\n")[1].split("\n\n")[0]


async def test_only_the_last_signals_are_shown_to_people(
    plain_engine: ff.Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.cli.show._seen._SIGNALS", 3)
    target = await suspend(plain_engine, ff.count_signals(9, "k"))
    for number in range(5):
        await call("signal", target, "--name", f"n{number}", dsn=database)
    said = (await call("show", target, dsn=database)).out
    shown = said.split("\nSignals, the last 3\n")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split()[2] for line in shown] == ["n2", "n3", "n4"]
    assert len((await call("show", target, "--json", dsn=database)).json["signals"]) == 5


# What tasks wait for


@pytest_asyncio.fixture(loop_scope="session")
async def app(database: str) -> AsyncIterator[ff.App]:
    app = ff.App(database)
    yield app
    await app.close()


async def worked(app: ff.App) -> None:
    """Everything that can be done now is done."""
    await asyncio.wait_for(ff.Worker(app, duties=False).run(until_idle=True), 60)


async def test_a_task_waits_for_a_person_and_gets_the_answer(app: ff.App, engine: ff.Engine, ask: Any) -> None:
    @app.task
    async def deploy(ctx: ff.Context) -> str:
        answer = await ctx.wait_for("approval", reason="approval", timeout=timedelta(hours=4))
        return f"{answer.name} by {answer.source_identity}"

    done = await deploy.submit()
    await worked(app)
    (row,) = rows(await ask("waits"))
    assert (row["ID"], row["TASK"], row["FOR"], row["THEN"]) == (done.id, "deploy", "approval", "time out")
    said = (await ask("show", done.execution_id)).out
    assert "approval  wait  waiting" in said
    await ask("approve", done.execution_id, "--by", "alice")
    await worked(app)
    assert (await ask("wait", done.execution_id)).out == "approved by alice\n"
    said = (await ask("show", done.execution_id)).out
    assert "approval  wait  resumed" in said
    assert said.split("\nSteps\n")[1].split("\n\n")[0].endswith("approved")
    document = (await ask("show", done.execution_id, "--json")).json
    (step,) = [one for one in document["steps"] if one["kind"] == "wait"]
    assert [(one["name"], one["payload"]) for one in step["result"]] == [("approved", None)]
    await engine.redact_execution(done.execution_id)
    assert "alice" not in (await ask("show", done.execution_id, "--no-timeline")).out


async def test_a_task_that_waits_in_two_places_shows_both(app: ff.App, ask: Any) -> None:
    @app.task
    async def gather(ctx: ff.Context) -> list[str]:
        found = await asyncio.gather(ctx.wait_for("left"), ctx.wait_for("right"))
        return [one.name for one in found]

    done = await gather.submit()
    await worked(app)
    assert sorted((row["KEY"], row["FOR"], row["DEADLINE"]) for row in rows(await ask("waits"))) == [
        ("left", "signal", ""),
        ("right", "signal", ""),
    ]
    document = (await ask("show", done.execution_id, "--json")).json
    assert sorted((one["waitpoint_key"], one["expires_at"]) for one in document["waitpoints"]) == [
        ("left", None),
        ("right", None),
    ]
    for key in ("left", "right"):
        await ask("signal", done.execution_id, "--key", key, "--name", key)
    await worked(app)
    assert json.loads((await ask("wait", done.execution_id)).out) == ["left", "right"]


# The other commands


async def test_lists_show_what_is_suspended_and_resumable(engine: ff.Engine, ask: Any) -> None:
    resumable = await suspend(engine)
    await engine.resume_execution(resumable, "operator")
    suspended = await suspend(engine, of=await started(engine, priority=9))
    assert [line.split()[:2] for line in (await ask("ls")).out.splitlines()[1:]] == [
        [suspended, "suspended"],
        [resumable, "resumable"],
    ]
    for state, target in (("suspended", suspended), ("resumable", resumable)):
        assert (await ask("ls", "-q", "--state", state)).out == f"{target}\n"
    (lane,) = (await ask("lanes", "--json")).json["lanes"]
    assert (lane["depth"], lane["running"], lane["delayed"]) == (1, 0, 0)
    frame = (await ask("top", "--once", "--interval", "100ms", "--json")).json
    assert frame["running"] == frame["failed"] == []
    said = await ask("top", "--once", "--interval", "100ms")
    assert "default  active  1" in said.out
    said = await ask("wait", suspended, "--timeout", "100ms", code=3)
    assert said.err == f"flowfabric: {suspended} did not end in time; it is suspended\n"
    assert (await ask("cancel", "--state", "suspended", "-y")).out == "1 cancelled\n"
    assert await engine.read_execution_state(suspended) is ff.State.CANCELLED


@pytest.mark.parametrize(("behavior", "state"), [("fail", "failed"), ("expire", "expired"), ("cancel", "cancelled")])
async def test_failures_name_a_wait_that_ended_them(
    engine: ff.Engine, clock: Clock, ask: Any, behavior: Any, state: str
) -> None:
    target = await suspend(engine, timeout_at=await clock.now() + HOUR, timeout_behavior=behavior)
    await clock.advance(hours=2)
    await engine.expire_suspension(target)
    (line,) = (await ask("failures", "--state", state)).out.splitlines()[1:]
    assert line.split()[:2] == [target, state]
    assert line.endswith(f"suspension_timeout:{behavior}")
    assert f"{target} is {state} and waits for no signal" in (await ask("approve", target, code=1)).err


async def test_doctor_sees_overdue_suspensions(
    engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any], ask: Any
) -> None:
    await suspend(engine, timeout_at=await clock.now() + HOUR)
    await sql.execute("delete from flowfabric.timer where kind = 'lease'")  # of the lease it had

    async def duties() -> str:
        findings = (await ask("doctor", "--json", code=1)).json["findings"]  # the tests' server is not durable
        return str(next(one["verdict"] for one in findings if one["check"] == "duties"))

    assert await duties() == "ok"
    await clock.advance(hours=2)
    assert await duties() == "warning"
    await engine.run_timers("suspension")
    assert await duties() == "ok"


# Terminals and shells


async def test_stored_text_cannot_control_the_terminal(engine: ff.Engine, ask: Any) -> None:
    target = await suspend(engine, ff.any_of(EVIL, "b"), execution_kind=f"kind{EVIL}")
    for command, code in (
        (["waits"], 0),
        (["waits", "--json"], 0),
        (["approve", target], 2),
        (["approve", target, "--key", EVIL + "x"], 1),
        (["signal", target, "--key", "b", "--name", EVIL], 0),
        (["show", target], 0),
        (["waits", "--lane", EVIL], 2),
    ):
        said = await ask(*command, code=code)
        assert not set(said.out + said.err) & set("\x1b\u202e"), command


async def test_ids_and_keys_are_completed(engine: ff.Engine, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.cli._completion._PATIENCE", 30)
    one = await suspend(engine, on("apples"))
    await suspend(engine, ff.any_of("avocados", "pears"))

    async def complete(line: str, dsn: str = database) -> set[str]:
        place = str(len(line.split(" ")) - 1)
        asked = {
            "_FLOWFABRIC_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": place,
            "FLOWFABRIC_DSN": dsn,
        }
        done = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, [], prog_name="flowfabric", env=asked)
        return set(done.stdout.split())

    assert await complete("flowfabric appr") == {"approve"}
    assert await complete(f"flowfabric approve {str(one)[:-1]}") == {str(one)}
    assert await complete("flowfabric waits --key a") == {"apples", "avocados"}
    assert await complete(f"flowfabric signal {one} --key a") == {"apples"}
    assert await complete(f"flowfabric signal {one} --by me --key ") == {"apples"}
    assert await complete(f"flowfabric waits --token {one} --key ") == {"apples"}
    assert await complete("flowfabric waits --key a", dsn="") == set(), "no server is started for a completion"


async def test_show_has_no_internals_and_no_base64(app: ff.App, ask: Any) -> None:
    @app.task
    async def child(n: int) -> dict[str, int]:
        return {"n": n}

    @app.task
    async def parent(ctx: ff.Context) -> str:
        assert await (await child.submit(7)).result() == {"n": 7}
        await ctx.wait_for("approval", timeout="1h", on_timeout="escalate")
        return "x" * 5000

    run = await parent.submit()
    await worked(app)
    said = (await ask("show", run.id)).out
    steps = said.split("\nSteps\n")[1].split("\n\n")[0]
    assert "timeout of" not in steps
    assert '{"n": 7}' in steps
    for internal in ("worker_park", "by backend", "waiting_for_", "eyJ", "claim_resumed", "paused_by", "lease revoked"):
        assert internal not in said, said
    result = next(one for one in (await ask("show", run.id, "--json")).json["steps"] if one["kind"] == "result")
    assert (result["result"]["state"], result["result"]["result"]) == ("completed", {"n": 7})
    await ask("approve", run.id)
    await worked(app)
    shown = (await ask("show", run.id)).out.split("\nResult\n")[1].split("\n\n")[0].splitlines()
    hint = f"  ... (3,000 more characters; `flowfabric show {run.id[-8:]} --wide` prints all)"
    assert shown == ["  " + "x" * 2000, hint]


async def test_an_escalated_wait_waits_for_an_operator(engine: ff.Engine, clock: Clock, ask: Any) -> None:
    target = await suspend(
        engine,
        reason_code="waiting_for_approval",
        timeout_at=await clock.now() + HOUR,
        timeout_behavior="escalate",
    )
    await clock.advance(hours=2)
    await engine.expire_suspension(target)
    said = (await ask("show", target)).out
    assert re.search(r"^because +missed its deadline of .* \(approval\), waiting for an operator$", said, re.MULTILINE)
    assert "paused" not in said
    assert "paused" not in (await ask("waits")).out


async def test_show_and_doctor_say_why_nothing_is_claimed(engine: ff.Engine, ask: Any) -> None:
    target = await submit(engine, execution_kind="report", lane_id="mail")
    why = (
        "no live worker serves report in lane mail (no worker is alive); start one with `flowfabric worker module:app`"
    )
    assert re.search(rf"^but +{re.escape(why)}$", (await ask("show", target)).out, re.MULTILINE)
    assert (await ask("show", target, "--json")).json["unserved"]["kind"] == "report"
    findings = {one["check"]: one for one in (await ask("doctor", "--json", code=1)).json["findings"]}
    assert findings["tasks"]["detail"] == "no live worker serves report in lane mail"
    assert findings["lanes"]["detail"] == "none is paused or disabled"
    await ask("lanes", "pause", "mail")
    said = (await ask("show", target)).out
    assert re.search(r"^but +lane mail is paused; start it with `flowfabric lanes resume mail`$", said, re.MULTILINE)
    findings = {one["check"]: one for one in (await ask("doctor", "--json", code=1)).json["findings"]}
    assert findings["lanes"] == {
        "check": "lanes",
        "verdict": "warning",
        "detail": "mail is paused, 1 execution waiting",
        "advice": "`flowfabric lanes resume mail` lets workers claim again",
    }
    assert findings["tasks"]["verdict"] == "ok"
