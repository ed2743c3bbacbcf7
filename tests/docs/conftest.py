"""Environments for programs that the tests start as a user would, and a check for processes left behind."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from flowfabric._postgres import scratch
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from tests.conftest import FAST
from tests.places import place_of_data
from tests.support import in_database
from tests.wiped import wiped_database, wiped_plain_engine  # noqa: F401 - fixtures

_MARK = "FOR_A_TEST_OF_THE_DOCUMENTATION"


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with its own data directory; afterwards no process may be left that was started with it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("FLOWFABRIC_")}
    env.pop("PYTHONUNBUFFERED", None)  # it changes the order of lines
    env["FLOWFABRIC_DATA_DIR"] = str(tmp_path / "data")
    env[_MARK] = uuid.uuid4().hex
    yield env
    until = time.monotonic() + 60
    while left := _started_with(env[_MARK]):
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data directory of a server that runs all the time, and so starts once for many programs."""
    shared = tmp_path_factory.getbasetemp()
    place = place_of_data(shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared)
    server = embedded.start(place / f"documentation-{os.getpid()}", settings=FAST)
    with psycopg.connect(in_database(server.dsn, "postgres"), autocommit=True) as connection:
        connection.execute("create database ready strategy file_copy")
    asyncio.run(migrate_database(in_database(server.dsn, "ready")))
    with psycopg.connect(in_database(server.dsn, "ready"), autocommit=True) as connection:
        connection.execute(scratch.UNCLAIMED)
    yield server.data_dir
    server.release()


@pytest.fixture
def on_one_server(surroundings: dict[str, str], data_dir: Path) -> dict[str, str]:
    """An environment in which the embedded server runs already, with a migrated database."""
    server = embedded.start(data_dir)
    try:
        with psycopg.connect(in_database(server.dsn, "postgres"), autocommit=True) as connection:
            connection.execute("drop database if exists flowfabric with (force)")
            connection.execute("create database flowfabric template ready strategy file_copy")
    finally:
        server.release()
    return {**surroundings, "FLOWFABRIC_DATA_DIR": str(data_dir)}


def _started_with(mark: str) -> list[str]:
    """The processes that carry the mark, where the system can tell."""
    sought = f"{_MARK}={mark}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sought in (process / "environ").read_bytes() + b"\0":
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found
