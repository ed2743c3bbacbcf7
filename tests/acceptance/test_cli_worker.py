"""`flowfabric worker` and `dev` as real processes: signals, restarts, kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.embedded import server as embedded
from tests.integration.test_cli import run_here

PROGRAM = str(Path(sys.executable).with_name("flowfabric"))
PATIENCE = 60.0
JOBS = """
import asyncio
import os
import pathlib

import flowfabric as ff

app = ff.App(name="jobs")
here = pathlib.Path(__file__).parent


@app.task
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.task(lane="mail")
def mail(to: str) -> str:
    return f"to {to}"


@app.task
async def hold(name: str, seconds: float) -> str:
    (here / name).write_text(str(os.getpid()))
    await asyncio.sleep(seconds)
    return name


@app.task
async def version() -> str:
    return "VERSION 1"


@app.task
async def ask(ctx: ff.Context) -> str:
    boss = await ctx.waitpoint("boss")
    return boss.link
"""


class Project:
    """A directory with an app, a database, and the processes that run there."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.code = folder / "jobs.py"
        self.code.write_text(JOBS)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLOWFABRIC_")}
        self.settings = settings
        self.environment = {**inherited, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **settings}
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        """A process that keeps running, and the file its output goes to."""
        output = self.folder / f"output-{len(self._running)}"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [PROGRAM, *arguments], cwd=self.folder, env=self.environment, stdout=file, stderr=file
            )
        self._running.append(process)
        return process, output

    def run(self, *arguments: str, code: int = 0) -> str:
        """A command to its end; its standard output. A worker, and what needs its own server, is a process."""
        if arguments[0] in ("worker", "dev") or "FLOWFABRIC_DSN" not in self.settings:
            done = subprocess.run(
                [PROGRAM, *arguments], cwd=self.folder, env=self.environment, capture_output=True, text=True,
                check=False, timeout=PATIENCE,
            )  # fmt: skip
        else:
            with ThreadPoolExecutor(1) as thread:  # because the tests have an event loop
                done = thread.submit(self._run_here, *arguments).result(PATIENCE)
        assert done.returncode == code, done
        return done.stdout.strip()

    def _run_here(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch, contextlib.chdir(self.folder):
            patch.setattr(sys, "path", [*sys.path])
            try:
                return run_here(*arguments, **self.settings)
            finally:
                sys.modules.pop("jobs", None)  # the next project has another

    def state(self, execution_id: str) -> str:
        return str(json.loads(self.run("show", execution_id, "--json"))["execution"]["public_state"])

    def end(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()


def until(condition: Callable[[], Any], output: Path | None = None) -> Any:
    """Wait until something is so; what a process said is shown if it never is."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, output.read_text() if output is not None else "it did not come"
        time.sleep(0.02)
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.fixture
def project(database: str, tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path, FLOWFABRIC_DSN=database)
    yield made
    made.end()


async def test_a_worker_runs_submitted_tasks_and_stops_on_request(project: Project) -> None:
    worker, output = project.start("worker", "jobs:app")
    assert project.run("submit", "jobs:app", "add", "2", "40", "--wait") == "42"
    assert project.run("submit", "jobs:app", "mail", "ada", "--wait") == "to ada", "the lanes of the tasks are served"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
    assert "has stopped" in output.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_running_handler_may_end_within_the_grace(project: Project, number: signal.Signals) -> None:
    worker, output = project.start("worker", "jobs:app", "--grace", "60s")
    execution_id = project.run("submit", "jobs:app", "hold", "busy", "1")
    until((project.folder / "busy").exists, output)
    worker.send_signal(number)
    assert worker.wait(PATIENCE) == 0
    assert project.state(execution_id) == "completed"


async def test_a_handler_that_does_not_end_is_given_back(project: Project) -> None:
    worker, output = project.start("worker", "jobs:app", "--grace", "100ms")
    execution_id = project.run("submit", "jobs:app", "hold", "busy", "3600")
    until((project.folder / "busy").exists, output)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
    assert project.state(execution_id) == "waiting"


def test_a_worker_serves_its_health_without_a_program(project: Project) -> None:
    worker, output = project.start("worker", "jobs:app", "--health-port", "0")
    found = until(lambda: re.search(r"http://(127\.0\.0\.1:\d+)/livez", output.read_text()), output)
    until(lambda: ", lanes " in output.read_text(), output)
    project.run("submit", "jobs:app", "add", "1", "--wait")
    answers = {}
    for path in ("livez", "readyz", "metrics"):
        with urllib.request.urlopen(f"http://{found[1]}/{path}", timeout=PATIENCE) as answer:
            answers[path] = answer.read().decode()
    assert answers["livez"] == answers["readyz"] == "ok\n"
    assert 'flowfabric_executions_total{kind="add",outcome="ok"} 1' in answers["metrics"].splitlines()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0, output.read_text()


async def test_a_second_signal_stops_immediately(project: Project) -> None:
    worker, output = project.start("worker", "jobs:app", "--grace", "1h")
    execution_id = project.run("submit", "jobs:app", "hold", "busy", "3600")
    until((project.folder / "busy").exists, output)
    worker.send_signal(signal.SIGTERM)
    until(lambda: "is stopping: 1 running" in output.read_text(), output)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 128 + signal.SIGTERM
    assert project.state(execution_id) == "active", "its lease lapses, and another worker takes it"


async def test_a_worker_may_end_when_nothing_is_left(project: Project) -> None:
    ids = [project.run("submit", "jobs:app", "add", str(n)) for n in range(3)]
    project.run("worker", "jobs:app", "--until-idle")
    assert [project.state(one) for one in ids] == ["completed"] * 3


async def test_a_worker_serves_only_the_lanes_and_tasks_given(project: Project) -> None:
    mail, add = project.run("submit", "jobs:app", "mail", "ada"), project.run("submit", "jobs:app", "add", "1")
    project.run("worker", "jobs:app", "--until-idle", "--lane", "mail=3", "--lane", "other")
    assert (project.state(mail), project.state(add)) == ("completed", "waiting")
    project.run("worker", "jobs:app", "--until-idle", "--task", "version")
    assert project.state(add) == "waiting"
    project.run("worker", "jobs:app", "--until-idle", "--task", "add", "--ack-each", "--concurrency", "1")
    assert project.state(add) == "completed"


async def test_log_lines_may_be_json(project: Project) -> None:
    worker, output = project.start("worker", "jobs:app", "--json", "--worker-id", "me")
    project.run("submit", "jobs:app", "add", "1", "--wait")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert any("me/" in line["message"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["jobs:ap"], "did you mean jobs:app?"),
        (["jobs:app", "--lane", "x=0"], "lanes"),
        (["jobs:app", "--lane", "x", "--lane", "x=2"], "given twice"),
        (["jobs:app", "--task", "none"], "no task 'none'"),
        (["jobs:app", "--grace", "soon"], "--grace"),
        (["jobs:app", "--log-level", "loud"], "--log-level"),
        (["jobs:app", "--dsn", "postgresql://u:s3cr3t@127.0.0.1:1/d"], "cannot be reached"),
    ],
)
async def test_a_worker_that_cannot_begin_says_why(project: Project, arguments: list[str], words: str) -> None:
    worker, output = project.start("worker", *arguments)
    assert worker.wait(PATIENCE) == 2
    (line,) = output.read_text().splitlines()
    assert line.startswith("flowfabric: ")
    assert words in line
    assert "s3cr3t" not in line


async def test_dev_loads_changed_code(project: Project) -> None:
    dev, output = project.start("dev", "jobs:app")
    assert project.run("submit", "jobs:app", "version", "--wait") == "VERSION 1"
    project.code.write_text(JOBS.replace("VERSION 1", "VERSION 2 at last"))
    until(lambda: "jobs.py changed" in output.read_text(), output)
    until(lambda: output.read_text().count("tasks add") == 2, output)
    assert project.run("submit", "jobs:app", "version", "--wait") == "VERSION 2 at last"

    project.code.write_text(JOBS + "\nthis is not Python\n")
    until(lambda: "the worker ended with 2; waiting for a change" in output.read_text(), output)
    assert "(jobs.py:" in output.read_text()
    project.code.write_text(JOBS.replace("VERSION 1", "VERSION 3, and it works"))
    until(lambda: output.read_text().count("tasks add") == 3, output)
    assert project.run("submit", "jobs:app", "version", "--wait") == "VERSION 3, and it works"
    dev.send_signal(signal.SIGINT)
    assert dev.wait(PATIENCE) == 0
    assert "Traceback" not in output.read_text()


async def test_a_restart_gives_work_back(project: Project) -> None:
    _, output = project.start("dev", "jobs:app", "--grace", "100ms")
    execution_id = project.run("submit", "jobs:app", "hold", "busy", "3600")
    first = int(until(lambda: (project.folder / "busy").exists() and (project.folder / "busy").read_text(), output))
    (project.folder / "other.py").write_text("# new\n")
    until(lambda: (project.folder / "busy").read_text() not in ("", str(first)), output)
    assert not is_alive(first)
    attempts = json.loads(project.run("show", execution_id, "--json"))["attempts"]
    assert len(attempts) == 1, "the same attempt continues"


async def test_a_worker_does_not_outlive_dev(project: Project) -> None:
    dev, output = project.start("dev", "jobs:app", "--grace", "100ms")
    project.run("submit", "jobs:app", "hold", "busy", "3600")
    worker = int(until(lambda: (project.folder / "busy").exists() and (project.folder / "busy").read_text(), output))
    dev.kill()
    dev.wait()
    until(lambda: not is_alive(worker), output)


async def test_dev_refuses_a_directory_that_is_not_there(project: Project) -> None:
    project.run("dev", "jobs:app", "--watch", "nowhere", code=2)


def test_dev_needs_nothing_but_the_code(tmp_path: Path) -> None:
    project = Project(tmp_path)
    try:
        dev, output = project.start("dev", "jobs:app", "--listen", "127.0.0.1:0")
        until(lambda: "tasks add" in output.read_text() and "serving" in output.read_text(), output)
        assert project.run("submit", "jobs:app", "add", "1", "--wait") == "2"
        assert "completed" in project.run("ls")
        address = re.search(r"the server is at (http://127\.0\.0\.1:\d+),", output.read_text())
        assert address is not None
        with urllib.request.urlopen(f"{address[1]}/v1/executions", timeout=PATIENCE) as answer:
            assert [one["execution_kind"] for one in json.load(answer)["items"]] == ["add"]
        link = project.run("submit", "jobs:app", "ask", "--wait")
        assert f"{address[1]}/w/" in link, "links lead to the server of dev"
        dev.send_signal(signal.SIGTERM)
        assert dev.wait(PATIENCE) == 0
        assert project.run("ls", "--quiet", "--state", "completed"), "the data stay"
    finally:
        project.end()
        embedded.stop(tmp_path / ".flowfabric")


async def test_schedules_run_when_asked(project: Project, database: str) -> None:
    project.code.write_text(JOBS + '\napp.schedule(add, 41, name="yearly", cron="0 0 1 1 *")\n')
    worker, output = project.start("worker", "jobs:app")
    until(lambda: json.loads(project.run("schedules", "--json"))["schedules"], output)
    execution_id = project.run("schedules", "run", "yearly")
    assert project.run("wait", execution_id) == "42"
    project.run("schedules", "run", "yearl", code=1)
    async with await ff.Engine.connect(database) as engine:
        schedule = await engine.read_schedule("yearly")
    assert schedule is not None
    assert schedule.last_at is None, "its own times stay as they are"
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE) == 0
