"""Workers are killed where tasks wait for signals: nothing is lost, tokens stay valid, steps run once.

Real processes that kill themselves at a call of the engine, or are killed from outside while signals arrive.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import StateError
from tests import sampling
from tests.acceptance import waits_app

SCRIPT = Path(__file__).with_name("waits_app.py")
PATIENCE = 60.0

pytestmark = [pytest.mark.xdist_group("waits faults")]


class Site:
    """An app, its database, and the worker processes on it."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.ledger_file = folder / "ledger.jsonl"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.app = waits_app.app
        self.app.dsn = dsn

    def hire(self, die: str | None = None) -> subprocess.Popen[bytes]:
        env = {**os.environ, "DSN": self.dsn, "LEDGER": str(self.ledger_file)}
        if die is not None:
            env["DIE"] = die
        options = json.dumps({"grace": 5, "lease_ttl": 1, "poll": 0.2})
        with (self.folder / f"worker-{len(self.processes)}.err").open("wb") as errors:
            process = subprocess.Popen([sys.executable, str(SCRIPT), options], stderr=errors, env=env)
        self.processes.append(process)
        return process

    async def killed(self, process: subprocess.Popen[bytes]) -> None:
        assert await asyncio.to_thread(process.wait, PATIENCE) == -signal.SIGKILL, self.words()

    async def stop(self, process: subprocess.Popen[bytes]) -> None:
        said = self.folder / f"worker-{self.processes.index(process)}.err"
        await self.until(lambda: ", lanes " in said.read_text())
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0, self.words()

    def ledger(self, what: str) -> list[dict[str, Any]]:
        if not self.ledger_file.exists():
            return []
        lines = [json.loads(line) for line in self.ledger_file.read_text().split("\n")[:-1]]
        return [line for line in lines if line["what"] == what]

    async def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.words()
            await asyncio.sleep(0.02)

    def words(self) -> str:
        return "\n".join(one.read_text()[-3000:] for one in sorted(self.folder.glob("*.err")))

    async def tell(self, run: ff.Run[Any], key: str, payload: Any) -> None:
        """Signal a key as soon as it can be."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                await run.signal(key, payload=payload)
            except (ff.NotFound, StateError):
                assert time.monotonic() < deadline, self.words()
                await asyncio.sleep(0.02)
            else:
                return

    async def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        await self.app.close()


@pytest.fixture
async def site(database: str, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(database, tmp_path)
    yield site
    try:
        assert await (await site.app.client()).engine.audit(events=True) == []
    finally:
        await site.close()


# Where a worker dies: opening the waitpoint, before and after it gave the lease back, when it looks what came of it.
DEATHS = {
    "open_wait": [("approval", "before"), ("approval", "after"), ("plain", "after"), ("company", "after")],
    "settle_wait": [("approval", "before"), ("approval", "after"), ("plain", "after"), ("company", "after")],
    "suspend_on": [("approval", "before"), ("approval", "after"), ("plain", "before"), ("plain", "after")],
    "park": [("company", "before"), ("company", "after")],
}


@pytest.mark.parametrize(
    ("task", "die"),
    sampling.rotate([[(task, f"{call} {when}") for task, when in deaths] for call, deaths in DEATHS.items()]),
)
async def test_a_worker_dies_on_its_way_into_a_wait(site: Site, task: str, die: str) -> None:
    client = await site.app.client()
    run = await client.submit(task)
    await site.killed(site.hire(die))
    links = [line["link"] for line in site.ledger("link")]
    if not links:
        assert "open_wait" in die
    else:
        received = await client.receive(links[0], b'"yes"', idempotency_key="once")  # nobody is there
        assert (received.status, received.outcome) in ((202, "accepted"), (200, "resumed"))
    second = site.hire()
    await site.until(lambda: site.ledger("link"))
    if not links:
        await site.until(lambda: len(site.ledger("link")) > len(links))
        received = await client.receive(site.ledger("link")[0]["link"], b'"yes"', idempotency_key="once")
        assert received.status in (200, 202)
    if task == "company":
        await site.tell(run, "other", "too")
    assert await run.result(PATIENCE) == (["yes", "too", None] if task == "company" else ["yes"]), site.words()
    again = await client.receive(site.ledger("link")[0]["link"], b'"yes"', idempotency_key="once")
    assert (again.outcome, again.signal_id) == ("duplicate", received.signal_id)
    await site.stop(second)
    assert len({line["link"] for line in site.ledger("link")}) == 1, "one waitpoint and one token, whoever runs it"
    assert [len(site.ledger(step)) for step in ("before", "after")] == [1, 1]


@pytest.mark.parametrize("task", sampling.seeds("company", "approval", "plain"))
async def test_a_worker_dies_with_the_signal_in_its_hands(site: Site, task: str) -> None:
    """The signal has woken the execution, and the worker that took it up is lost before it did anything with it."""
    client = await site.app.client()
    run = await client.submit(task)
    first = site.hire()

    async def rests() -> bool:
        return await run.state() is ff.State.SUSPENDED

    deadline = time.monotonic() + PATIENCE
    while not (site.ledger("link") and await rests()):
        assert time.monotonic() < deadline, site.words()
        await asyncio.sleep(0.02)
    first.kill()
    await site.killed(first)
    assert (await client.receive(site.ledger("link")[0]["link"], b'"yes"')).status in (200, 202)
    if task == "company":
        await run.signal("other", payload="too")
    await site.killed(site.hire("read_steps before"))
    await site.killed(site.hire("record_steps before"))  # of the step that follows: its function has run
    second = site.hire()
    assert await run.result(PATIENCE) == (["yes", "too", None] if task == "company" else ["yes"]), site.words()
    await site.stop(second)
    assert [len(site.ledger(step)) for step in ("before", "after")] == [1, 2]
    signals = (await client.engine.read_signals(run.execution_id)).items
    assert len([one for one in signals if one.source_type == "callback"]) == 1


async def test_workers_are_killed_at_random_while_signals_arrive(site: Site) -> None:
    client = await site.app.client()
    dice = random.Random(7)
    tasks = ["approval", "plain", "company"]
    runs = [(task, await client.submit(task)) for task in tasks for _ in range(8)]
    workers = [site.hire() for _ in range(2)]

    async def call(run: ff.Run[Any]) -> None:
        await site.until(lambda: any(line["execution"] == run.id for line in site.ledger("link")))
        await asyncio.sleep(3 * dice.random())
        link = next(line["link"] for line in site.ledger("link") if line["execution"] == run.id)
        for _ in range(2):  # as those do that hear nothing
            received = await client.receive(link, b'"yes"', idempotency_key="once")
            assert received.status in (200, 202), received

    async def kill() -> None:
        for _ in range(4):
            await asyncio.sleep(0.3 + dice.random())
            victim = dice.randrange(2)
            workers[victim].kill()
            await site.killed(workers[victim])
            workers[victim] = site.hire()

    await asyncio.gather(
        kill(),
        *(call(run) for _, run in runs),
        *(site.tell(run, "other", "too") for task, run in runs if task == "company"),
    )
    for task, run in runs:
        assert await run.result(PATIENCE) == (["yes", "too", None] if task == "company" else ["yes"]), site.words()
    for worker in workers:
        await site.stop(worker)
    links = collections.defaultdict(set)
    for line in site.ledger("link"):
        links[line["execution"]].add(line["link"])
    assert {len(found) for found in links.values()} == {1}
    assert len(links) == len(runs)
