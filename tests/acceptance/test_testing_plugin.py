"""Small projects of users, tested by pytest in processes of their own: the plugin as it is installed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from flowfabric.embedded import server as embedded

PATIENCE = 60.0
AUTO = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
STRICT = ("-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function")
PLAIN = ("-p", "no:asyncio", "-p", "no:anyio")

SHOP = """
    import flowfabric as ff

    app = ff.App("postgresql://nobody@production.example/orders")
    sent = []

    @app.task
    async def order(ctx: ff.Context, price: int) -> int:
        charged = await ctx.step("charge", lambda: price)
        await ctx.sleep(3600)
        await ctx.step("send", lambda: sent.append(charged))
        return charged
"""
ASYNC_TESTS = """
    import pytest
    from shop import app, order, sent

    {mark}
    async def test_an_order_is_sent_once(flowfabric_kit):
        sent.clear()
        with flowfabric_kit.crash_after("charge"):
            assert await flowfabric_kit.run_inline(order, 7) == 7
        assert sent == [7]

    {mark}
    async def test_nothing_is_left_of_the_test_before(flowfabric_kit):
        engine = await flowfabric_kit.engine()
        assert (await engine.find_executions()).items == []
        assert app.dsn == "postgresql://nobody@production.example/orders"
        flowfabric_kit.use(app)
        assert app.dsn == flowfabric_kit.dsn
"""
PLAIN_TESTS = """
    from shop import order, sent

    def test_an_order_is_sent_once(flowfabric_kit):
        with flowfabric_kit.replay_always():
            assert flowfabric_kit.wait(flowfabric_kit.run_inline(order, 7)) == 7
        assert sent == [7]

    def test_a_database_alone(flowfabric_dsn):
        assert flowfabric_dsn.startswith("postgresql://")
"""


class Project:
    """A folder with tests in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data_dir = root / "base" / "flowfabric-postgres"

    def write(self, **modules: str) -> None:
        for name, text in modules.items():
            (self.root / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")

    def test(self, *options: str, **environment: str) -> str:
        """Run pytest, which must succeed; gives what it said."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FLOWFABRIC_", "PYTEST_"))}
        command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "--basetemp", "base"]
        command += ["-p", "no:schemathesis"]  # what this repository has beside, and a user does not, takes a second
        (self.root / "pytest.ini").touch()  # the settings of this repository are not the user's
        done = subprocess.run(
            [*command, *options],
            cwd=self.root,
            env={**env, **environment},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.write(shop=SHOP)
    return made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("mark", "options"),
    [
        ("", AUTO),
        ("@pytest.mark.asyncio", STRICT),
        ("@pytest.mark.asyncio(loop_scope='module')", STRICT),
        ("@pytest.mark.anyio", ("-p", "no:asyncio")),
    ],
    ids=["asyncio auto", "asyncio strict", "a loop of several tests", "anyio"],
)
def test_async_tests_of_a_project_run(
    project: Project, flowfabric_dsn: str, mark: str, options: tuple[str, ...]
) -> None:
    backend = "import pytest\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    project.write(test_shop=ASYNC_TESTS.replace("{mark}", mark), conftest=backend)
    assert "2 passed" in project.test(*options, FLOWFABRIC_TEST_DSN=flowfabric_dsn)


def test_a_project_without_any_async_plugin_tests_in_plain_functions(project: Project, flowfabric_dsn: str) -> None:
    project.write(test_shop=PLAIN_TESTS)
    assert "2 passed" in project.test(*PLAIN, FLOWFABRIC_TEST_DSN=flowfabric_dsn)


def test_a_server_starts_by_itself_and_stops_after_the_run(project: Project) -> None:
    project.write(test_shop=PLAIN_TESTS)
    assert "2 passed" in project.test(*PLAIN)
    assert project.data_dir.exists()
    until(lambda: not embedded.is_running(project.data_dir))


def test_the_processes_of_a_run_share_one_server(project: Project) -> None:
    project.write(
        test_many="""
        import pytest, urllib.parse

        @pytest.mark.parametrize("n", range(6))
        def test_it(flowfabric_dsn, n, worker_id):
            host = urllib.parse.parse_qs(urllib.parse.urlsplit(flowfabric_dsn).query)["host"][0]
            with open("used", "a") as used:
                print(worker_id, host, flowfabric_dsn, file=used)
        """
    )
    assert "6 passed" in project.test("-n", "2", *PLAIN)
    used = [line.split() for line in (project.root / "used").read_text().splitlines()]
    assert {worker for worker, _, _ in used} == {"gw0", "gw1"}
    assert len({host for _, host, _ in used}) == 1
    assert len({dsn for _, _, dsn in used}) == 6


def test_a_project_that_does_not_use_it_pays_nothing(project: Project) -> None:
    project.write(
        test_other="""
        import sys

        def test_nothing_is_loaded(request):
            assert request.config.pluginmanager.has_plugin("flowfabric")
            assert not {"flowfabric", "asyncpg", "msgspec"} & sys.modules.keys()
        """
    )
    assert "1 passed" in project.test(*PLAIN)
    assert not project.data_dir.exists()


def test_fixtures_are_listed_with_what_they_are_for(project: Project) -> None:
    said = project.test("--fixtures", *PLAIN)
    for words in ("flowfabric_dsn", "A `flowfabric.testing.Kit` on a fresh database", "FLOWFABRIC_TEST_DSN"):
        assert words in said


def test_a_server_of_the_users_own_is_used_and_left_clean(project: Project, flowfabric_dsn: str) -> None:
    project.write(
        test_pid="""
        import os

        def test_it(flowfabric_dsn):
            with open("pid", "w") as file:
                print(os.getpid(), file=file)
            assert f"/flowfabric_test_{os.getpid()}_" in flowfabric_dsn
        """
    )
    assert "1 passed" in project.test(*PLAIN, FLOWFABRIC_TEST_DSN=flowfabric_dsn)
    assert not project.data_dir.exists()
    pid = (project.root / "pid").read_text().strip()

    async def left() -> list[str]:
        connection = await asyncpg.connect(flowfabric_dsn)
        rows = await connection.fetch("select datname from pg_database")
        await connection.close()
        return [row["datname"] for row in rows]

    names = asyncio.run(left())
    assert any(name.startswith("flowfabric_test_") for name in names)  # ours, on the same server
    assert [name for name in names if name.startswith(f"flowfabric_test_{pid}_")] == []
