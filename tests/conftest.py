"""A real Postgres for every run, a fresh database for every test, and an engine that checks itself.

`server` starts once per run and is shared by the test processes; `database` is a copy of a migrated template; `engine`
audits the whole database after every operation; `clock` moves the only clock there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import hypothesis
import pytest

import flowfabric as ff
from flowfabric._postgres import scratch
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from tests import sampling
from tests.databases import fresh_database
from tests.kept import the_keeper  # noqa: F401 - the fixture of all modules: one database, not one for each
from tests.places import place_of_data
from tests.support import CheckedEngine, Clock, in_database, system_programs
from tests.wiped import WipedServer, the_wiped  # noqa: F401 - as above

FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "400",
    "max_prepared_transactions": "20",
    "shared_buffers": "128MB",
    "autovacuum_naptime": "1d",  # never in a run, but on, as the doctor wants it
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "512MB",
}

# Every run plays the same examples, and none fails because the machine is slow. To hunt, set `derandomize` to False.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--servers",
        choices=("marked", "all"),
        default="marked",
        help="which SQL tests also run on the system's Postgres: those marked both_servers, or all",
    )
    parser.addoption("--full", action="store_true", help="all seeds and full products instead of a sample of them")


def pytest_configure(config: pytest.Config) -> None:
    sampling.configure(full=config.getoption("--full"))
    # A run in the background of a shell ignores Ctrl-C, and so would every process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `--full` what a short run need not play; tests on a kept database run in the event loop of the run."""
    for item in items:
        if hasattr(getattr(item, "module", None), "kept_state") and item.get_closest_marker("asyncio"):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
    if config.getoption("--full"):
        return
    kept = set(_without_repetition([item for item in items if not item.get_closest_marker("slow")]))
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def _without_repetition(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of a test marked `each_value`, as few cases as show each row of each of its tables; of the others, all."""
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            yield item
    for cases in products.values():
        yield from sampling.each_value([(case.callspec._idlist, case) for case in cases])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests run on the wheel's Postgres; those marked `both_servers` also on the system's, where one is found."""
    if "server" in metafunc.fixturenames:
        majors = ["wheel"]
        is_all = metafunc.config.getoption("--servers") == "all" and "/tests/sql/" in str(metafunc.definition.path)
        is_marked = metafunc.definition.get_closest_marker("both_servers") is not None
        if (is_all or is_marked) and system_programs() is not None:
            majors.append("system")
        metafunc.parametrize("server", majors, indirect=True, scope="session")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The DSN of a running server with a migrated template database in it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with running_server(shared, getattr(request, "param", "wheel")) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def flowfabric_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WipedServer]:
    """The server of the testing kit, with its data beside those of the other servers of the run."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with WipedServer(place_of_data(shared) / "kit") as server:
        yield server


@contextlib.contextmanager
def running_server(shared: Path, which: str) -> Iterator[str]:
    """Start the server of a run, or use the one that another process of the same run has started."""
    programs = system_programs() if which == "system" else None
    with _environment("FLOWFABRIC_PG_BIN", str(programs) if programs else None):
        running = embedded.start(place_of_data(shared) / f"postgres-{which}", settings=FAST)
    with open(shared / f"template-{which}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asyncio.run(_make_template(running.dsn))
    yield running.dsn
    running.release()


async def _make_template(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        if await connection.fetchval("select 1 from pg_database where datname = 'ff_template'"):
            return
        await connection.execute("create database ff_making")
        await migrate_database(in_database(dsn, "ff_making"))
        inside = await asyncpg.connect(in_database(dsn, "ff_making"))
        await inside.execute("update flowfabric.deployment set event_heartbeats = true")  # every event is tested
        await inside.execute(scratch.UNCLAIMED)
        await inside.close()
        await connection.execute("alter database ff_making rename to ff_template")
    finally:
        await connection.close()


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    try:
        if value is not None:
            os.environ[name] = value
        yield
    finally:
        if value is not None:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


@pytest.fixture(name="database")
async def new_database(server: str) -> AsyncIterator[str]:
    """The DSN of a fresh, migrated database."""
    async with fresh_database(server) as dsn:
        yield dsn


@pytest.fixture
async def engine(database: str) -> AsyncIterator[CheckedEngine]:
    """An engine that audits the database after every operation and once more at the end."""
    async with await CheckedEngine.connect(database) as engine:
        yield engine
        await engine.check()


@pytest.fixture(name="plain_engine")
async def new_plain_engine(database: str) -> AsyncIterator[ff.Engine]:
    """An engine without the audit after each operation, for volume; audited once at the end."""
    async with await ff.Engine.connect(database) as engine:
        yield engine
        assert await engine.audit(events=True) == []


@pytest.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A plain connection of the owner, for looking behind the functions."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def clock(sql: asyncpg.Connection[Any]) -> Clock:
    """Moves the database's clock."""
    return Clock(sql)
