"""The pytest plugin: fixtures for tests of tasks. `flowfabric.testing` holds what they give.

A module of its own, outside the package: pytest imports it in every run, and the package only when a fixture is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flowfabric.testing import Kit, Server


@pytest.fixture(scope="session")
def flowfabric_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The Postgres behind `flowfabric_dsn`: started once per run, or the one that FLOWFABRIC_TEST_DSN names."""
    from flowfabric import settings  # noqa: PLC0415
    from flowfabric.testing import Server  # noqa: PLC0415

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # that of the whole run
    with Server(shared / "flowfabric-postgres", settings.load().test_dsn) as server:
        yield server


@pytest.fixture
def flowfabric_dsn(flowfabric_server: Server) -> Iterator[str]:
    """The DSN of a fresh, migrated database for this test."""
    with flowfabric_server.database() as dsn:
        yield dsn


@pytest.fixture
def flowfabric_kit(flowfabric_dsn: str) -> Iterator[Kit]:
    """A `flowfabric.testing.Kit` on a fresh database: run tasks, move the clock, crash."""
    from flowfabric.testing import Kit  # noqa: PLC0415

    with Kit(flowfabric_dsn) as kit:
        yield kit
