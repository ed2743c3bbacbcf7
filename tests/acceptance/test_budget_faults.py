"""A worker process is killed with SIGKILL while it spends: what a crash costs, and that nothing is counted twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import flowfabric as ff
from tests.acceptance import spend_app

SCRIPT = Path(spend_app.__file__)
PATIENCE = 60.0

pytestmark = [pytest.mark.xdist_group("budget faults")]
# Where it dies, what happens to what it held: used and held once the lease is lost, and used in the end.
POINTS = [
    ("claimed", "charge", (0, 0)),
    ("before", "charge", (0, 0)),
    ("held", "charge", (500, 0)),  # the call may have been made
    ("held", "release", (0, 0)),
    ("asked", "charge", (500, 0)),
    ("settled", "charge", (120, 0)),
    ("reported", "charge", (127, 0)),
]


@contextmanager
def worker(dsn: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(SCRIPT)], env={**os.environ, "DSN": dsn})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("dies", "on_lost", "after"), POINTS)
async def test_a_killed_worker_is_charged_once_and_the_settlement_takes_the_place_of_the_charge(
    database: str, dies: str, on_lost: str, after: tuple[int, int]
) -> None:
    app = ff.App(database, name="spending")
    app.tasks["agent"] = spend_app.agent
    async with app, asyncio.timeout(PATIENCE):
        client = await app.client()
        await client.create_budget("team", hard={"tokens": 1_000})
        await client.create_quota("one", concurrent=1)
        run = await client.submit(spend_app.agent.options(), dies, on_lost)
        with worker(database) as process:
            assert await asyncio.to_thread(process.wait) == -9
        async with ff.Duties(client.engine):  # expires the lease, as any worker would
            while (found := await run.get()).lease_lost is None or await numbers(client) != after:
                await asyncio.sleep(0.02)
        assert found.public_state is ff.State.ACTIVE
        assert (await client.quota("one")).active == 1, "it keeps its slot until a worker takes it over"
        with worker(database):
            assert await run.result() == 120
        assert await numbers(client) == (127, 0)
        assert (await client.quota("one")).active == 0
        assert await client.engine.audit() == []


async def numbers(client: ff.AsyncClient) -> tuple[int, int]:
    found = await client.budget("team")
    return found.usage.get("tokens", 0), found.held.get("tokens", 0)
