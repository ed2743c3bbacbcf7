"""From the shell to a task: finding the app, reading the arguments, submitting, waiting."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.cli import dev
from flowfabric.cli._loading import load_app
from flowfabric.cli._options import parse_duration, parse_moment
from flowfabric.cli.submit import read_arguments
from flowfabric.cli.worker import weights
from flowfabric.values.ids import parse_execution_id
from tests.ids import id_in
from tests.integration.test_cli import call
from tests.integration.test_connection import SECRET, as_user
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import claim_one, started, submit

SHOP = """
import datetime
import zlib

import flowfabric as ff


class Zip:
    name = "zip"

    def encode(self, data: bytes) -> bytes:
        return zlib.compress(data)

    def decode(self, data: bytes) -> bytes:
        return zlib.decompress(data)


app = ff.App(name="shop")
zipped = ff.App(name="zipped", codecs=[Zip()])
not_an_app = 1


@app.task
async def buy(item: str, count: int = 1, *, on: datetime.date | None = None, tags_: list[str] = []) -> str:
    return f"{count} {item}"


@zipped.task
async def hide(text: str) -> str:
    return text
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a module of the user's, which is the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "ff_shop.py").write_text(SHOP)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("ff_"):
            del sys.modules[name]


def refusal(name: str) -> str:
    with pytest.raises(ff.InvalidInput) as caught:
        load_app(name)
    return str(caught.value)


def test_an_app_is_found_in_the_current_directory() -> None:
    assert load_app("ff_shop:app").name == "shop"
    assert load_app("ff_shop:zipped").name == "zipped"


def test_the_only_app_of_a_module_needs_no_name(here: Path) -> None:
    (here / "ff_single.py").write_text("import flowfabric as ff\nmine = ff.App(name='single')\n")
    assert load_app("ff_single").name == "single"
    assert "did you mean ff_shop:app or ff_shop:zipped?" in refusal("ff_shop")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ff_shop:ap", "ff_shop has no ap; did you mean ff_shop:app"),
        ("ff_shop:", "ff_shop: does not say which app"),
        ("ff_shop:not_an_app", "is a int, not an App"),
        ("ff_shop:app.tasks.x", "has no app.tasks.x"),
        ("ff_shpo:app", "there is no module ff_shpo; did you mean ff_shop?"),
        ("ff_nothing_like_it:app", "there is no module ff_nothing_like_it; searched "),
        ("ff_shop.py:app", "is a path; did you mean ff_shop:app?"),
        ("./src/ff_shop.py", "did you mean src.ff_shop:app?"),
        ("", "got ''"),
        ("ff shop:app", "got 'ff shop:app'"),
    ],
)
def test_for_a_missing_app_the_error_lists_those_that_exist(name: str, words: str) -> None:
    assert words in refusal(name)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import flowfabric\n\nimport ff_not_installed\n", "(ff_bad.py:3): there is no module ff_not_installed"),
        ("x = 1\n\n\n1 / 0\n", "(ff_bad.py:4): ZeroDivisionError: division by zero"),
        ("def broken(:\n", "(ff_bad.py:1): SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import flowfabric as ff\napp = ff.App(lane='')\n", "(ff_bad.py:2): invalid_input"),
        ("app = 1\n", "ff_bad:app is a int, not an App, and there is no App in ff_bad"),
    ],
)
def test_a_module_that_does_not_load_is_named_with_the_line(here: Path, code: str, words: str) -> None:
    (here / "ff_bad.py").write_text(code)
    assert words in refusal("ff_bad:app")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["tea"], {"item": "tea"}),
        (["tea", "2"], {"item": "tea", "count": 2}),
        (["item=tea", "count=2"], {"item": "tea", "count": 2}),
        (["count=2", "tea"], {"item": "tea", "count": 2}),
        (["42"], {"item": "42"}),
        (['"42"'], {"item": "42"}),
        (["null"], {"item": "null"}),
        (["a=b"], {"item": "a=b"}),
        (["item=a=b"], {"item": "a=b"}),
        (["tea", "on=2024-05-01"], {"item": "tea", "on": datetime.date(2024, 5, 1)}),
        (["tea", "on=null"], {"item": "tea", "on": None}),
        (["tea", 'tags_=["x", "y"]'], {"item": "tea", "tags_": ["x", "y"]}),
    ],
)
def test_arguments_are_read_as_the_task_wants_them(texts: list[str], expected: dict[str, object]) -> None:
    assert read_arguments(load_app("ff_shop:app").tasks["buy"], texts) == expected


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["tea", "two"], "count"),
        (["tea", "item=milk"], "item: is given twice"),
        (["tea", "2", "3"], "buy: '3' fits no parameter; allowed: item: str"),
        (["tea", "2", "conut=3"], "did you mean count?"),
        (["tea", "on=soon"], "on"),
        ([], "item: is missing"),
    ],
)
async def test_wrong_arguments_are_refused_before_anything_is_stored(
    engine: ff.Engine, database: str, texts: list[str], named: str
) -> None:
    said = await call("submit", "ff_shop:app", "buy", *texts, dsn=database, code=2)
    assert named in said.err
    assert (await engine.find_executions()).items == []


async def test_a_task_is_submitted_with_its_options(engine: ff.Engine, database: str) -> None:
    options = [
        "--lane",
        "slow",
        "-p",
        "7",
        "--key",
        "k",
        "-n",
        "acme",
        "-t",
        "a.b=c",
        "-t",
        "d.e=f",
        "--deadline",
        "1h",
    ]
    said = await call("submit", "ff_shop:app", "buy", "tea", *options, dsn=database)
    execution = await engine.read_execution(parse_execution_id(said.out.strip()))
    assert execution is not None
    assert (execution.lane_id, execution.priority, execution.namespace) == ("slow", 7, "acme")
    assert execution.tags == {"a.b": "c", "d.e": "f"}
    assert execution.deadline_at is not None
    again = await call("submit", "ff_shop:app", "buy", "tea", *options, "--json", dsn=database)
    assert again.json == {"execution_id": str(execution.execution_id), "is_new": False}
    later = await call("submit", "ff_shop:app", "buy", "tea", "--delay", "1h", "--json", dsn=database)
    assert await engine.read_execution_state(later.json["execution_id"]) is ff.State.DELAYED
    assert (
        "one of them"
        in (
            await call("submit", "ff_shop:app", "buy", "x", "--delay", "1h", "--at", "2099-01-01", dsn=database, code=2)
        ).err
    )


async def test_for_an_unknown_task_the_error_lists_the_tasks(database: str) -> None:
    assert "did you mean buy?" in (await call("submit", "ff_shop:app", "bye", dsn=database, code=1)).err
    assert "there are buy" in (await call("submit", "ff_shop:app", "nothing_near", dsn=database, code=1)).err
    assert "--wait" in (await call("submit", "ff_shop:app", "buy", "x", "--timeout", "1s", dsn=database, code=2)).err


# wait


async def test_wait_prints_the_result(engine: ff.Engine, database: str) -> None:
    claimed = await started(engine)
    waiting = asyncio.create_task(call("wait", str(claimed.execution_id), dsn=database))
    await engine.complete(claimed.handle, b'{"n": [1, 2]}')
    said = await waiting
    assert (said.out, said.err) == ('{"n": [1, 2]}\n', "")
    answer = (await call("wait", claimed.execution_id, "--json", dsn=database)).json
    assert (answer["public_state"], answer["result"], answer["is_ended"]) == ("completed", {"n": [1, 2]}, True)


async def test_wait_for_a_failed_execution_exits_with_1(engine: ff.Engine, database: str) -> None:
    claimed = await started(engine)
    await engine.fail(claimed.handle, "boom\nmore", failure_class="permanent")
    said = await call("wait", claimed.execution_id, dsn=database, code=1)
    assert said.out == ""
    assert said.err == f"flowfabric: {claimed.execution_id} failed: boom\n"
    answer = (await call("wait", claimed.execution_id, "--json", dsn=database, code=1)).json
    assert answer["failure_reason"] == "boom\nmore"


async def test_wait_ends_with_3_when_it_takes_too_long(engine: ff.Engine, database: str) -> None:
    execution_id = await submit(engine)
    said = await call("wait", execution_id, "--timeout", "50ms", dsn=database, code=3)
    assert "did not end in time; it is waiting" in said.err
    answer = (await call("wait", execution_id, "--timeout", "0", "--json", dsn=database, code=3)).json
    assert (answer["public_state"], answer["is_ended"]) == ("waiting", False)


async def test_wait_for_what_does_not_exist_ends_with_1(database: str) -> None:
    assert "not found: execution" in (await call("wait", id_in(1), dsn=database, code=1)).err


async def test_encoded_data_is_read_with_the_codecs_of_the_app(engine: ff.Engine, database: str) -> None:
    said = await call("submit", "ff_shop:zipped", "hide", "the text", dsn=database)
    execution_id = said.out.strip()
    claimed = await claim_one(engine)
    result, encoding = load_app("ff_shop:zipped").codecs.seal(b'"the result"', None)
    await engine.complete(claimed.handle, result, result_encoding=encoding)
    closed = (await call("show", execution_id, dsn=database)).out
    assert "the text" not in closed
    assert closed.count(" bytes, sealed>") == 2
    unread = await call("wait", execution_id, dsn=database)
    assert re.fullmatch(r"<\d+ bytes, sealed>\n", unread.out)
    assert unread.err == "(the result is encoded; give --app PKG.MOD:APP to read it)\n"
    opened = (await call("show", execution_id, "--app", "ff_shop:zipped", dsn=database)).out
    assert '{"text": "the text"}' in opened
    assert "the result" in opened
    assert (await call("wait", execution_id, "--app", "ff_shop:zipped", dsn=database)).out == "the result\n"
    other = (await call("show", execution_id, "--app", "ff_shop:app", dsn=database)).out
    assert other.count(" bytes, sealed: there is no codec 'zip' (encoding 'json+zip')>") == 2
    assert "Timeline" in other


@pytest.mark.parametrize("moment", ["0001-01-01", "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00"])
async def test_an_invalid_time_is_refused(engine: ff.Engine, database: str, moment: str) -> None:
    said = await call("submit", "ff_shop:app", "buy", "x", "--at", moment, dsn=database, code=2)
    assert said.err.startswith("flowfabric: --at: ")
    assert len(said.err.splitlines()) == 1


# worker and dev


@pytest.mark.parametrize("command", ["worker", "dev"])
@pytest.mark.parametrize(
    "options",
    [
        ["--lane", "a=0"], ["--lane", "a=101"], ["--lane", "a=" + "9" * 5000], ["--lane", "a", "--lane", "a"],
        ["--lane", "a" * 300], ["--log-level", "bogus"], ["--grace", "soon"],
    ],
    ids=lambda options: " ".join(options)[:20],
)  # fmt: skip
async def test_an_error_that_no_file_change_repairs_is_refused_immediately(
    database: str, command: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # of the whole process, which goes on
    monkeypatch.setattr(dev._Supervisor, "run", lambda self: pytest.fail("it supervises"))
    said = await call(command, "ff_shop:app", *options, dsn=database, code=2)
    assert said.err.startswith((f"flowfabric: {options[0]}: ", "flowfabric: lanes: "))
    assert len(said.err.splitlines()) == 1


def test_a_weight_is_a_number_and_anything_else_is_refused() -> None:
    assert weights(["a=3", "b", "c=d=100"]) == {"a": 3, "b": 1, "c=d": 100}
    for text in ("c=\u00b2", "d=x", "e=", "=3", "f=1000"):
        with pytest.raises(
            ff.InvalidInput, match=r"--lane: got .*; allowed: LANE, or LANE=WEIGHT with a number up to 100"
        ):
            weights([text])


async def test_the_address_is_not_in_the_process_list_of_the_worker(
    database: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "ff_elsewhere.py").write_text("import flowfabric as ff\napp = ff.App('postgresql://elsewhere/db')\n")
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    given: dict[str, Any] = {}
    commands: list[list[str]] = []
    seen: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: (given.update(rest), commands.append(command)))
    monkeypatch.setattr(dev._Supervisor, "run", lambda self: self._start())
    monkeypatch.setattr(ff.Worker, "main", lambda self: seen.append(self.app.address))
    address = as_user(database, "postgres", SECRET)
    await call("dev", "ff_elsewhere:app", dsn=address)
    worker, server = commands
    assert SECRET not in " ".join([*worker, *server])
    assert "--dsn-of-environment" in server
    assert given["env"]["FLOWFABRIC_DSN"] == address

    monkeypatch.setenv("FLOWFABRIC_DSN", address)
    (program, arguments) = worker[:3], worker[3:]
    assert program == server[:3] == [sys.executable, "-m", "flowfabric.cli"]
    await call(*(one for one in arguments if not one.startswith("--parent")))
    assert seen == [(address, None)], "it wins over the address in the app's code"

    commands.clear()
    del sys.modules["ff_elsewhere"]  # with the app that was told another address
    await call("dev", "ff_elsewhere:app")
    await call(*(one for one in commands[0][3:] if not one.startswith("--parent")))
    assert seen[1] == ("postgresql://elsewhere/db", None), "the environment alone does not"


# durations and times


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("1.5", 1.5), ("250ms", 0.25), ("90s", 90), ("15m", 900), ("15min", 900), ("2h", 7200), ("1d", 86400),
     ("1h30m", 5400), ("1 h 30 m", 5400), ("1w", 604800), ("0", 0)],
)  # fmt: skip
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "x").total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "h", "-5", "5x", "1h30", "1 30", "5 minutes ago", "1e9", "99999999999d"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ff.InvalidInput, match="x: got"):
        parse_duration(text, "x")


def test_times_are_read_with_and_without_zone() -> None:
    assert parse_moment("2024-05-01T12:00:00Z", "x") == datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
    local = parse_moment("2024-05-01 12:00", "x")
    assert local.tzinfo is not None
    assert local.replace(tzinfo=None) == datetime.datetime(2024, 5, 1, 12)
    before = datetime.datetime.now(datetime.UTC)
    ago = parse_moment("1h", "x") + datetime.timedelta(hours=1)
    assert before <= ago <= datetime.datetime.now(datetime.UTC)
