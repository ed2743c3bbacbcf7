"""Workers are killed in the middle of flows: every node completes, once, with the real results of its upstreams.

Real processes that kill themselves at a call of the engine, or are killed from outside.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import flowfabric as ff
from flowfabric.app.flow_builder import Flow
from tests import sampling
from tests.acceptance import flows_app
from tests.acceptance.flows_app import app, forever, grow, outer, plain, square, total
from tests.acceptance.site import PATIENCE, Site, opened

pytestmark = [pytest.mark.xdist_group("flows faults")]


class FlowsSite(Site):
    """Counts completions."""

    async def completions(self) -> collections.Counter[str]:
        """How often each execution was completed, by what was recorded of it."""
        engine = (await self.app.client()).engine
        events = (await engine.read_events(family="completion", limit=10_000)).items
        return collections.Counter(str(event.execution_id) for event in events if event.outcome == "success")


@pytest.fixture
async def site(database: str, tmp_path: Path) -> AsyncIterator[FlowsSite]:
    program = ("-m", "tests.acceptance.flows_app")
    async with opened(FlowsSite(database, tmp_path, flows_app.app, *program, concurrency=4)) as site:
        yield site


def big() -> tuple[Flow, dict[str, int]]:
    """A flow of about 50 nodes, some of which are added on the way, and what its nodes must return."""
    flow = app.flow("big")
    first = flow.add(square, 2, name="first")
    wide = flow.map(square, range(20), after=first, name="wide")
    middle = flow.add(total, wide, name="middle")
    chain = [flow.add(square, 1, after=middle, name="chain")]
    for _ in range(9):
        chain.append(flow.add(square, chain[-1], name=f"chain-{len(chain) + 1}"))
    race = ff.any_of(flow.add(square, 3, name="fast", after=first), flow.add(forever, name="slow"), cancel_rest=True)
    won = flow.add(square, race, name="won")
    most = flow.add(total, ff.quorum(2, flow.map(square, [5, 5, 5], after=won, name="vote")), name="most")
    grown = flow.add(grow, 6, after=middle)
    waits = [flow.add(outer, 4, after=first), flow.add(plain, 4, after=first)]
    flow.add(total, [middle, chain[-1], won, grown, *waits], after=most, name="end")
    squares = sum(n * n for n in range(20))
    meant = {
        "first": 4, "middle": squares, "fast": 9, "won": 81, "grow": 6, "outer": 14, "plain": 14,
        "end": squares + 1 + 81 + 6 + 14 + 14, "grown sum": sum(n * n for n in range(6)) + 6,
    }  # fmt: skip
    meant |= {("wide" if n == 0 else f"wide-{n + 1}"): n * n for n in range(20)}
    meant |= {("grown" if n == 0 else f"grown-{n + 1}"): n * n for n in range(6)}
    meant |= {("chain" if n == 0 else f"chain-{n + 1}"): 1 for n in range(10)}
    return flow, meant | {"vote": 25, "vote-2": 25, "vote-3": 25}


async def check(site: FlowsSite, run: ff.FlowRun, meant: dict[str, int]) -> None:
    results = await run.result(PATIENCE)
    most = results.pop("most")
    assert most in (50, 75), "two of three votes, or three that ended together"
    assert results == meant
    states = await run.states()
    assert states.pop("slow") is ff.State.CANCELLED
    assert set(states.values()) == {ff.State.COMPLETED}
    assert len(states) == len(meant) + 1 == 49, "no node was added twice"
    inner = (await (await site.app.client()).flows(name="inner")).items
    assert len(inner) == 2, "a flow for each that waits, however often it ran"
    ids = {str(run.nodes[name]) for name in states}
    for one in inner:
        found = await (await site.app.client()).flow(one.flow_id).refresh()
        assert len(found.nodes) == 5
        ids |= {str(node) for node in found.nodes.values()}
    completions = await site.completions()
    assert set(completions) == ids
    assert set(completions.values()) == {1}
    # On every worker, and however often it ran, a join was given the same.
    given: dict[str, set[str]] = collections.defaultdict(set)
    for line in site.ledger("total"):
        given[line["execution"]].add(json.dumps(line["ns"]))
    assert {len(found) for found in given.values()} == {1}


async def test_workers_are_killed_at_random_in_the_middle_of_a_flow(site: FlowsSite) -> None:
    dice = random.Random(5)
    flow, meant = big()
    workers = [site.hire() for _ in range(2)]
    await site.until(lambda: all(", lanes " in one.read_text() for one in site.folder.glob("*.err")))
    run = await flow.submit()

    async def kill() -> int:
        for kills in range(12):
            before = len(site.ledger("square"))
            await site.until(lambda before=before: len(site.ledger("square")) > before)
            await asyncio.sleep(0.1 * dice.random())
            if not await run.live():
                return kills
            victim = dice.randrange(2)
            workers[victim].kill()
            await site.killed(workers[victim])
            workers[victim] = site.hire()
        return 12

    killing = asyncio.ensure_future(kill())
    try:
        await run.wait(PATIENCE)
        assert (killing.result() if killing.done() else 3) >= 3, "they were killed while it ran"
    finally:
        killing.cancel()
    await check(site, run, meant)
    for worker in workers:
        if worker.poll() is None:
            await site.stop(worker)


# Where a worker dies: adding nodes, submitting a flow, on its way into the wait for it, at completions.
DEATHS = [
    ["extend_flow before", "extend_flow after"],
    ["submit_child_flow before", "submit_child_flow after"],
    ["park before", "park after"],
    ["list_flow_members after"],
    ["complete_many before", "complete_many after"],
    ["cancel_siblings after"],
]


@pytest.mark.parametrize("die", sampling.rotate(DEATHS))
async def test_a_worker_dies_at_a_call_of_a_flow(site: FlowsSite, die: str) -> None:
    assert hasattr(ff.Engine, die.split()[0])
    flow, meant = big()
    run = await flow.submit()
    await site.killed(site.hire(die))
    last = site.hire()
    await check(site, run, meant)
    await site.stop(last)
