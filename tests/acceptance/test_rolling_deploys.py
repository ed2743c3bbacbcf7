"""Two builds of this package, installed from wheels, at work side by side while the database is migrated under load."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._postgres.build import THIS
from flowfabric._postgres.migrate import SCHEMA_VERSION
from tests.docs.pages import fences

pytestmark = pytest.mark.xdist_group("builds")  # which are made once
ROOT = Path(__file__).parents[2]
PATIENCE = 90.0
APP = """
import os
import flowfabric as ff
from flowfabric._postgres.build import THIS

app = ff.App(name="shop")


def note(what: str) -> str:
    fd = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{THIS.version} {what}\\n".encode())
    os.close(fd)
    return what


@app.task
async def part(number: int) -> int:
    return number


@app.task
async def order(ctx: ff.Context, number: int) -> int:
    await ctx.step("charge", note, f"charge {number}")
    found = await (await part.submit(number)).result()
    await ctx.step("ship", note, f"ship {number}")
    return found
"""


def _copy(place: Path) -> Path:
    """The sources of the package, in a folder of their own."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return place


def _change(place: Path, version: int) -> None:
    """The next version: a changed function, a function with another signature, and a new column."""
    sql = place / "src" / "flowfabric" / "_postgres" / "sql"
    stated = {"version": version, "oldest": version - 1, "released": {}}
    (sql / "version.json").write_text(json.dumps(stated))
    (sql / "schema" / f"{SCHEMA_VERSION + 1:04d}_note.sql").write_text(
        "alter table flowfabric.execution add column note text; alter table flowfabric.step add column note text;"
    )
    for path in sql.rglob("*.sql"):
        text = path.read_text()
        text = text.replace("create or replace function flowfabric.record_steps(", "DEFINED")
        text = text.replace("flowfabric.record_steps(", "flowfabric.record_steps('as a child', ")
        text = text.replace("DEFINED", "create or replace function flowfabric.record_steps(p_note text,")
        path.write_text(text)
    _edit(sql / "functions" / "executions" / "complete.sql", "-- complete:", "-- Of the next version.\n-- complete:")
    package = place / "src" / "flowfabric"
    _edit(package / "_postgres" / "statements.py", '_rows("record_steps", 18,', '_rows("record_steps", 19,')
    _edit(package / "engine" / "steps.py", "statements.RECORD_STEPS, *", 'statements.RECORD_STEPS, "a note", *')


def _edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1, f"{path} has changed: {before}"
    path.write_text(text.replace(before, after))


def _install(place: Path, where: Path) -> Path:
    """Build a wheel, and unpack it where PYTHONPATH can point."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=place, check=True, capture_output=True
    )
    (wheel,) = (place / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(where)
    return where


class Builds:
    def __init__(self, folder: Path) -> None:
        self.old = _install(_copy(_made(folder / "old sources")), folder / "old")
        place = _copy(_made(folder / "new sources"))
        _change(place, THIS.version + 1)
        self.new = _install(place, folder / "new")


def _made(place: Path) -> Path:
    place.mkdir()
    return place


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("builds"))


class Page:
    """The commands of the section "Roll out a new version", with the package that gives each and what it prints."""

    def __init__(self) -> None:
        text = (ROOT / "docs" / "guides" / "deploy.md").read_text(encoding="utf-8")
        begin = text.count("\n", 0, text.index("## Roll out a new version"))
        end = text.count("\n", 0, text.index("## Worker processes"))
        found = [block for block in fences(ROOT / "docs" / "guides" / "deploy.md") if begin < block.line < end]
        self.steps = list(zip(found[::2], found[1::2], strict=True))

    def follow(self, fleet: Fleet, build: Path) -> None:
        """Give the next command of the page, which is of this build."""
        command, printed = self.steps.pop(0)
        assert command.remark == ("the old package" if build == fleet.builds.old else "the new package")
        said = fleet.run(build, *command.code.split()[1:])
        # On the page the build before is the first one.
        expected = printed.code.replace("version 2 (", f"version {SCHEMA_VERSION + 1} (")
        expected = re.sub(r"0002(?=_note)", f"{SCHEMA_VERSION + 1:04d}", expected)
        expected = re.sub(
            r"(functions (?:are )?of version) (\d)", lambda at: f"{at[1]} {THIS.version - 1 + int(at[2])}", expected
        )
        assert said == expected


class Fleet:
    """Workers of two builds, and the orders they work on."""

    def __init__(self, builds: Builds, dsn: str, folder: Path) -> None:
        self.builds = builds
        self.dsn = dsn
        self.folder = folder
        self.ledger = folder / "ledger"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.submitted = 0
        (folder / "shop.py").write_text(APP)
        self.app = ff.App(dsn, name="shop")

        @self.app.task
        async def order(ctx: ff.Context, number: int) -> int:
            return number

        self.order = order

    def environment(self, build: Path) -> dict[str, str]:
        paths = os.pathsep.join([str(build), str(self.folder)])
        return {**os.environ, "PYTHONPATH": paths, "LEDGER": str(self.ledger), "FLOWFABRIC_DSN": self.dsn}

    def run(self, build: Path, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flowfabric.cli", *arguments],
            env=self.environment(build), cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout + done.stderr

    def hire(self, build: Path) -> subprocess.Popen[bytes]:
        with open(self.folder / f"worker {len(self.workers)}.err", "wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "flowfabric.cli", "worker", "shop:app", "--concurrency", "20"],
                env=self.environment(build), cwd=self.folder, stderr=log,
            )  # fmt: skip
        self.workers.append(worker)
        return worker

    async def dismiss(self, worker: subprocess.Popen[bytes]) -> None:
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, PATIENCE) == 0
        self.workers.remove(worker)

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Submit one order after the other during the block, then wait for all of them."""
        runs = []
        stopped = asyncio.Event()

        async def submit() -> None:
            while not stopped.is_set():
                runs.append(await self.order.submit(self.submitted))
                self.submitted += 1
                await asyncio.sleep(0.02)

        submitting = asyncio.create_task(submit())
        try:
            yield
        finally:
            stopped.set()
            await submitting
        async with asyncio.timeout(PATIENCE):
            for run in runs:
                await run.result()

    async def until_done_by(self, version: int) -> None:
        """Wait until a worker of a version has done something since."""
        before = self.done_by()[version]
        async with asyncio.timeout(PATIENCE):
            while self.done_by()[version] == before:
                await asyncio.sleep(0.02)

    def lines(self) -> list[list[str]]:
        return [line.split(" ", 1) for line in self.ledger.read_text().splitlines()] if self.ledger.exists() else []

    def done_by(self) -> collections.Counter[int]:
        return collections.Counter(int(version) for version, _ in self.lines())

    async def check(self, sql: asyncpg.Connection[Any]) -> None:
        """Everything was done once, at the first attempt, and every audit is empty."""
        did = collections.Counter(what for _, what in self.lines())
        assert did == dict.fromkeys([f"{step} {n}" for n in range(self.submitted) for step in ("charge", "ship")], 1)
        odd = await sql.fetch(
            "select kind, state, attempt_index, reclaims from flowfabric.execution_view"
            " where state <> 'completed' or attempt_index > 0 or reclaims > 0"
        )
        assert odd == []
        client = await self.app.client()
        assert await client.engine.audit(events=True) == []


@pytest.fixture
async def fleet(builds: Builds, database: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    one = Fleet(builds, database, tmp_path)
    yield one
    await one.app.close()
    for worker in one.workers:
        worker.kill()
        worker.wait()


def test_the_builds_differ(builds: Builds, tmp_path: Path) -> None:
    def version(build: Path) -> Iterator[int]:
        code = "from flowfabric._postgres.build import THIS; print(THIS.version, THIS.oldest)"
        env = {**os.environ, "PYTHONPATH": str(build)}
        said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return map(int, said.stdout.split())

    assert list(version(builds.old)) == [THIS.version, THIS.oldest]
    assert list(version(builds.new)) == [THIS.version + 1, THIS.version]


async def test_all_workers_are_replaced_under_load_and_back_again(fleet: Fleet, sql: asyncpg.Connection[Any]) -> None:
    old, new = THIS.version, THIS.version + 1
    page = Page()
    refused = fleet.run(fleet.builds.new, "worker", "shop:app", code=2)
    assert "run `flowfabric migrate`" in refused

    first = fleet.hire(fleet.builds.old)
    async with fleet.load():
        await fleet.until_done_by(old)
        await asyncio.to_thread(page.follow, fleet, fleet.builds.new)
        await fleet.until_done_by(old)  # the old worker works on with the new functions
        second = fleet.hire(fleet.builds.new)
        await fleet.until_done_by(new)
        await fleet.dismiss(first)
        await fleet.until_done_by(new)

    # Back: the old build takes the functions as they are, and changes nothing.
    async with fleet.load():
        await fleet.until_done_by(new)
        await asyncio.to_thread(page.follow, fleet, fleet.builds.old)
        third = fleet.hire(fleet.builds.old)
        await fleet.until_done_by(old)
        await fleet.dismiss(second)
        await fleet.until_done_by(old)

    # Forced, the functions are the old ones again; the column that the new build added stays.
    async with fleet.load():
        await fleet.until_done_by(old)
        await asyncio.to_thread(page.follow, fleet, fleet.builds.old)
        await fleet.until_done_by(old)
    await fleet.dismiss(third)
    assert page.steps == []
    await fleet.check(sql)
    fleet.run(fleet.builds.old, "migrate")
    assert await sql.fetchval("select count(*) from pg_proc where proname = 'record_steps'") == 1
