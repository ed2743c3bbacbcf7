"""Workers are killed where tasks wait for signals: nothing is lost, tokens stay valid, steps run once.

Real processes that kill themselves at a call of the engine, or are killed from outside while signals arrive.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import flowfabric as ff
from tests import sampling
from tests.acceptance import waits_app
from tests.acceptance.site import PATIENCE, Site, opened

SCRIPT = Path(__file__).with_name("waits_app.py")

pytestmark = [pytest.mark.xdist_group("waits faults")]


@pytest.fixture
async def site(database: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with opened(Site(database, tmp_path, waits_app.app, str(SCRIPT))) as site:
        yield site


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
        received = await client.receive(links[0], b'"yes"', idempotency_key="once")  # no worker runs
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
    assert len({line["link"] for line in site.ledger("link")}) == 1, "one waitpoint and one token, on every worker"
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
