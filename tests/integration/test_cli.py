"""The command line, as a user meets it: output, exit codes, no tracebacks."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner
from typer.main import get_command

import flowfabric as ff
from flowfabric._postgres.migrate import SCHEMA_VERSION
from flowfabric.cli import app, main
from flowfabric.cli._database import near
from flowfabric.engine.service import schema_version
from flowfabric.values.execution import NewExecution
from tests import sampling
from tests.integration.test_connection import SECRET, a_role, as_user
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import submit


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed program, in an environment without settings of ours but the ones given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLOWFABRIC_")}
    done = subprocess.run(
        [Path(sys.executable).with_name("flowfabric"), *map(str, arguments)],
        env={**clean, "COLUMNS": "200", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


PROGRAM = str(Path(sys.executable).with_name("flowfabric"))
PATIENCE = 60.0


COMMAND_TREE = get_command(app)  # once: putting them together takes longer than most of them


class Answer:
    """What a command said, run in this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err
        assert "Traceback" not in err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"{self.code}: {self.out!r} {self.err!r}"


async def call(*arguments: object, dsn: str | None = None, answer: str = "", code: int = 0) -> Answer:
    """Run a command in this process, in a thread because it has an event loop of its own."""
    given = [*map(str, arguments), *(("--dsn", dsn) if dsn else ())]
    done = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, given, input=answer, env={"NO_COLOR": "1"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    said = Answer(done.exit_code, done.stdout, done.stderr)
    assert said.code == code, said
    return said


def run_here(*arguments: object, encoding: str = "utf-8", **environment: str) -> subprocess.CompletedProcess[str]:
    """As `run`, without a new process: the whole program with streams of this encoding. Not in an event loop."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace", write_through=True)
    given = ["flowfabric", *map(str, arguments)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", given)
        for name in [name for name in os.environ if name.startswith("FLOWFABRIC_")]:
            patch.delenv(name)
        for name, value in {"COLUMNS": "200", "NO_COLOR": "1", **environment}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
    said, complained = (stream.buffer.getvalue().decode(encoding) for stream in (out, err))  # type: ignore[attr-defined]
    assert "Traceback" not in complained
    return subprocess.CompletedProcess(given, int(ended.value.code or 0), said, complained)


async def here(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """As `run_here`, from a test that has an event loop."""
    return await asyncio.to_thread(run_here, *arguments, **environment)  # type: ignore[arg-type]


def failed(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a failure says, without secrets."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowfabric: ")
    assert SECRET not in line
    return line


def test_the_version_is_shown() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"flowfabric {ff.__version__}\n")


def test_without_a_command_the_help_is_shown() -> None:
    assert "migrate" in run_here().stdout
    assert "--worker-role" in run_here("migrate", "--help").stdout


async def test_an_empty_database_is_recognised_and_migrated(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("drop schema flowfabric cascade")
    check = await here("migrate", "--dsn", database, "--check")
    assert check.returncode == 1
    assert check.stdout == "the flowfabric schema is not installed; run `flowfabric migrate`\n"
    assert not await sql.fetchval("select to_regnamespace('flowfabric') is not null"), "a check changes nothing"

    done = await here("migrate", "--dsn", database)
    assert done.returncode == 0, done
    assert f"version {SCHEMA_VERSION}" in done.stdout
    assert "0001_" in done.stdout

    check = await here("migrate", "--check", FLOWFABRIC_DSN=database)
    assert (check.returncode, check.stdout) == (0, f"the schema is at version {SCHEMA_VERSION}, which is current\n")
    again = await here("migrate", FLOWFABRIC_DSN=database)
    assert again.returncode == 0
    assert "no new steps" in again.stdout


async def test_for_an_older_schema_the_error_names_the_command(database: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("delete from flowfabric.schema_step")
    await sql.execute("insert into flowfabric.schema_step (number, name) values (-1, 'from the past')")
    done = await here("migrate", "--check", "--dsn", database)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert "older than this package; run `flowfabric migrate`" in line


async def test_for_a_newer_schema_the_error_says_to_upgrade_the_package(
    database: str, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("insert into flowfabric.schema_step (number, name) values (9999, 'from_the_future')")
    await sql.execute("update flowfabric.build set version = 9, functions = 'newer'")
    assert (await call("migrate", "--check", dsn=database)).out == (
        "the functions are of version 9, newer than this package's, and serve its processes\n"
    )
    assert "nothing was changed" in (await call("migrate", dsn=database)).out
    assert (await call("migrate", "--json", dsn=database)).json["replaced"] is False
    await sql.execute("update flowfabric.build set oldest = 8")
    done = await here("migrate", "--check", "--dsn", database)
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert "newer than this package; upgrade the package" in line
    assert "version 9" in line
    assert (await call("migrate", "--check", "--json", dsn=database, code=1)).json["is_current"] is False
    assert "upgrade the package" in failed(await here("migrate", "--dsn", database))
    assert (await call("migrate", "--force", "--json", dsn=database)).json["replaced"] is True


async def test_worker_roles_are_named_on_the_command_line(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as one, a_role(sql) as two:
        done = await here("migrate", "--dsn", database, "--worker-role", one, "--worker-role", two)
        assert done.returncode == 0, done
        for role in (one, two):
            async with await ff.Engine.connect(as_user(database, role)) as engine:
                await submit(engine)
        await sql.execute("delete from flowfabric.granted_role")
    assert "there is no role" in failed(await here("migrate", "--dsn", database, "--worker-role", "no_such_role"))


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_an_unreachable_database_is_one_line(options: tuple[str, ...]) -> None:
    line = failed(run_here("migrate", "--dsn", f"postgresql://someone:{SECRET}@127.0.0.1:1/shop", *options))
    assert "cannot be reached" in line
    assert "127.0.0.1:1/shop" in line


async def test_a_user_without_rights_is_one_line(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as role:
        assert "lacks privileges" in failed(await here("migrate", "--dsn", as_user(database, role, SECRET)))
        assert "lacks privileges" in failed(await here("migrate", "--check", "--dsn", as_user(database, role, SECRET)))


async def test_the_worker_role_may_check_the_schema(database: str, sql: asyncpg.Connection[Any]) -> None:
    async with a_role(sql) as role:
        assert (await here("migrate", "--dsn", database, "--worker-role", role)).returncode == 0
        check = await here("migrate", "--check", "--dsn", as_user(database, role))
        assert (check.returncode, check.stderr) == (0, ""), check
        await sql.execute("delete from flowfabric.granted_role")


@pytest.mark.parametrize("is_there", [False, True])
async def test_the_version_is_read_whichever_build_the_functions_are_of(
    database: str, sql: asyncpg.Connection[Any], is_there: bool
) -> None:
    await sql.execute("drop function flowfabric.deployment_info")
    if is_there:
        await sql.execute(
            "create function flowfabric.deployment_info() returns table (other integer) language sql as 'select 1'"
        )
    await sql.execute("update flowfabric.build set functions = 'others'")
    assert await schema_version(database) == SCHEMA_VERSION
    assert (await call("migrate", "--json", dsn=database)).json["applied"] == []


def test_without_an_address_the_embedded_server_is_migrated(tmp_path: Path) -> None:
    place = str(tmp_path / "data")
    check = run("migrate", "--check", FLOWFABRIC_DATA_DIR=place)
    assert check.returncode == 1
    assert "not installed" in check.stdout
    assert run("migrate", FLOWFABRIC_DATA_DIR=place).returncode == 0
    assert run("migrate", "--check", FLOWFABRIC_DATA_DIR=place).returncode == 0


def test_an_embedded_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert str(in_the_way) in failed(run_here("migrate", FLOWFABRIC_DATA_DIR=str(in_the_way)))


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [(["shw"], "'show'"), (["lanes", "puase"], "'pause'"), (["ls", "--stat", "failed"], "--state")],
)
def test_a_mistyped_word_suggests_the_right_one(arguments: list[str], suggestion: str) -> None:
    done = run_here(*arguments)
    assert done.returncode == 2
    assert suggestion in done.stderr


async def test_a_failure_is_one_line_without_a_password(database: str) -> None:
    address = as_user(database, "nobody_of_that_name", SECRET)
    for arguments in (["ls"], ["show", "x"], ["lanes"], ["top", "--once"], ["cancel", "--state", "waiting", "-y"]):
        failed(await asyncio.to_thread(run_here, *arguments, "--dsn", address))
        failed(await asyncio.to_thread(run_here, *arguments, FLOWFABRIC_DSN=address))
    failed(run("ls", FLOWFABRIC_DSN=address))


def test_a_wrong_address_is_reported_without_its_secret() -> None:
    for address in (f"mysql://u:{SECRET}@h/d", f"postgresql://u:{SECRET}@[bad/d", f"password={SECRET} host=/nowhere"):
        for arguments in (["ls"], ["db", "url"], ["db", "dump"], ["doctor"]):
            done = run_here(*arguments, "--dsn", address)
            assert done.returncode == 2, done
            assert SECRET not in done.stdout + done.stderr


async def test_a_reader_that_leaves_early_is_no_error(plain_engine: ff.Engine, database: str) -> None:
    await plain_engine.create_many([NewExecution(execution_kind="test") for _ in range(1000)])
    shell = f"{PROGRAM} ls --all --quiet --dsn '{database}' | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1


async def test_ctrl_c_ends_a_command_quietly(database: str) -> None:
    watching = subprocess.Popen(
        [PROGRAM, "top", "--json", "--interval", "100ms", "--dsn", database],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["lanes"] == []
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=PATIENCE)
    assert (watching.returncode, err) == (130, "")


def on_a_terminal(*arguments: str, answers: str = "", columns: int = 120, **environment: str) -> tuple[int, str]:
    """The program as seen at a terminal: exit code and everything that appeared."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FLOWFABRIC_", "NO_COLOR"))}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(PROGRAM, [PROGRAM, *arguments], {**clean, "TERM": "xterm", "COLUMNS": str(columns), **environment})
    if answers:
        os.write(terminal, answers.encode())
    seen = b""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            break  # the other side is gone
        if not part:
            break
        seen += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen.decode()


async def test_a_question_is_asked_and_no_means_no(engine: ff.Engine, database: str) -> None:
    execution_id = await submit(engine)
    code, seen = on_a_terminal("cancel", "--kind", "test", "--dsn", database, answers="n\n")
    assert code == 1
    assert "cancel 1 execution?" in seen
    assert await engine.read_execution_state(execution_id) is ff.State.WAITING
    code, seen = on_a_terminal("cancel", "--kind", "test", "--dsn", database, answers="y\n")
    assert code == 0
    assert await engine.read_execution_state(execution_id) is ff.State.CANCELLED


async def test_a_terminal_shows_how_far_a_long_change_is(plain_engine: ff.Engine, database: str) -> None:
    await plain_engine.create_many([NewExecution(execution_kind="much") for _ in range(700)])
    code, seen = on_a_terminal("cancel", "--kind", "much", "--yes", "--dsn", database)
    assert code == 0
    assert "700/700" in seen
    assert "700 cancelled" in seen


async def test_the_live_view_fills_a_terminal_and_gives_it_back(engine: ff.Engine, database: str) -> None:
    execution_id = await submit(engine, lane_id="mail")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(PROGRAM, [PROGRAM, "top", "-i", "100ms", "--dsn", database], {**os.environ, "TERM": "xterm"})
    seen = b""
    while seen.count(b"per second") < 3:
        seen += os.read(terminal, 65536)
    assert b"mail" in seen
    os.kill(pid, signal.SIGINT)
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 65536):
            seen += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1, "the screen before is back"
    assert b"Traceback" not in seen
    assert await engine.read_execution_state(execution_id) is ff.State.WAITING


def test_the_help_is_pretty_on_a_terminal_and_plain_in_a_pipe() -> None:
    assert "\u2500" in on_a_terminal("--help")[1]
    plain = run("--help").stdout
    assert plain.isascii()
    for command in ("ls", "show", "doctor", "db"):
        assert f"\n  {command} " in plain
    assert "Exit codes: 0 done" in plain


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_be_taught_the_commands(shell: str) -> None:
    done = run_here("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0, done
    assert "flowfabric" in done.stdout


async def test_states_and_lanes_are_completed(engine: ff.Engine, database: str) -> None:
    await engine.set_lane_state("mail", "active")
    await engine.set_lane_state("maintenance", "active")
    await engine.set_lane_state("other", "active")

    def asked(line: str, **environment: str) -> dict[str, str]:
        cword = str(len(line.split(" ")) - 1)
        return {"_FLOWFABRIC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": cword, **environment}

    async def complete(line: str, **environment: str) -> set[str]:
        env = asked(line, **environment)
        done = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, prog_name="flowfabric", env=env)
        return set(done.stdout.split())

    assert await complete("flowfabric sh") == {"show"}
    assert await complete("flowfabric ls --state fa") == {"failed"}
    lanes = asked("flowfabric lanes pause ma", FLOWFABRIC_DSN=database)
    assert set(run(**lanes).stdout.split()) == {"mail", "maintenance"}
    assert await complete("flowfabric ls --lane ma", FLOWFABRIC_DSN=f"{database}_gone") == set()
    assert await complete("flowfabric ls --lane ma") == set(), "no server is started for a completion"


def test_an_unknown_option_is_refused() -> None:
    done = run_here("migrate", "--downgrade")
    assert done.returncode == 2
    assert "--downgrade" in done.stderr


@pytest.mark.each_value
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
@pytest.mark.parametrize(
    "moment", ["0001-01-01", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00"]
)
async def test_the_ends_of_time_are_one_line_at_most(
    database: str, moment: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for option in ("--since", "--until"):
            done = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, ["ls", option, moment, "--dsn", database])
            assert done.exit_code in (0, 2), done.exception
            assert len(done.stderr.splitlines()) == 1
            assert (done.exit_code == 2) == done.stderr.startswith(f"flowfabric: {option}")
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_a_message_cannot_steer_the_terminal(database: str) -> None:
    assert near("mai\x1b", ["mail\x1b"]) == r"did you mean mail\x1b?"
    for arguments in (
        ["show", "a\x1b]0;title\x07\u202e\x9b"],
        ["lanes", "pause", "mai\x1b]0;title\x07"],
        ["ls", "--lane", "mai\x1b]0;title\x07"],
        ["submit", "\x1b]0;title\x07/x.py", "task"],
    ):
        done = await asyncio.to_thread(CliRunner().invoke, COMMAND_TREE, [*arguments, "--dsn", database])
        assert "x1b" in done.stderr, arguments
        assert not set(done.output) & set("\x1b\x07\u202e\x9b"), arguments
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["ls", "--lane"], ["ls", "--kind"], ["show"], ["lanes", "pause"], ["ls", "--since"]]
)
async def test_arguments_that_are_no_text_are_one_line(database: str, arguments: list[str]) -> None:
    given = [*arguments, os.fsdecode(b"\xff\xfe"), "--dsn", database]
    if sampling.is_full() or arguments == ["ls", "--lane"]:
        done = await asyncio.to_thread(run, *given)
    else:
        done = await here(*given)
    assert done.returncode in (0, 1, 2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
