"""Two callers on one registration at the same time: the outcome is that of one of the two orders; nothing deadlocks.

One party makes its call in a transaction that stays open; the other call waits or passes; then the first commits or
rolls back.
"""

from __future__ import annotations

import asyncio
import itertools
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.values.worker import Marked, OwnWorker, Refreshed, Registered
from tests.interleave import PATIENCE, Party, Stage, settled
from tests.registry_model import Registry
from tests.support import WORKER, submit

KEY = ("", "pool-1")
TTL = 60
Step = tuple[str, ...]

STEPS: dict[str, Step] = {
    "register": ("register", "a"),
    "register as another": ("register", "b"),
    "heartbeat": ("heartbeat",),
    "own heartbeat": ("own heartbeat",),
    "mark dead": ("mark dead",),
    "sweep": ("sweep",),
    "claim": ("claim",),
}
STATES = ("absent", "alive", "lapsed")
CASES = [
    (state, first, second, ending)
    for state, first, second, ending in itertools.product(STATES, STEPS, STEPS, ("commit", "rollback"))
    if first != "claim" or second != "claim"
]


async def act(party: Party, step: Step, process: Any) -> Any:
    """Make the call; returns its outcome in a word."""
    match step:
        case "register", worker_id:
            done = await settled(
                party.register_worker(worker_id, KEY[1], lanes=["default"], liveness_ttl=timedelta(seconds=TTL))
            )
            if isinstance(done, ff.InvalidInput):
                return "reassigned"
            return "registered" if isinstance(done, Registered) else "refreshed"
        case ("heartbeat",):
            beat = await settled(party.heartbeat_worker(KEY[1]))
            return "refreshed" if isinstance(beat, Refreshed) else "not_registered"
        case ("own heartbeat",):
            beat = await settled(party.heartbeat_own(OwnWorker(worker_instance_id=KEY[1], process=process)))
            return "busy" if beat is None else "refreshed" if isinstance(beat, Refreshed) else "not_registered"
        case ("mark dead",):
            marked = await settled(party.mark_worker_dead(KEY[1], reason="test"))
            return "marked" if isinstance(marked, Marked) else "not_registered"
        case ("sweep",):
            return await settled(party.sweep_workers())
        case _:
            return await settled(party.claim(**WORKER)) is not None


def follow(model: Registry, step: Step, seen: Any) -> Any:
    """The same in the model; a call that may pass over locked rows may have done so."""
    match step:
        case "register", worker_id:
            return model.register(KEY, worker_id, TTL)
        case ("own heartbeat",):
            return "busy" if seen == "busy" else model.heartbeat(KEY)
        case ("heartbeat",):
            return model.heartbeat(KEY)
        case ("mark dead",):
            return model.mark_dead(KEY)
        case ("sweep",):
            return 0 if seen == 0 else model.sweep()
        case _:
            return True


def replayed(before: Registry, order: list[tuple[Step, Any]]) -> Registry | None:
    """What these calls leave, one after another; None if one of them would have returned something else."""
    model = before.copy()
    return model if all(follow(model, step, seen) == seen for step, seen in order) else None


async def prepare(stage: Stage, first: Party, state: str) -> Registry:
    await stage.empty()
    model = Registry()
    await submit(first)
    if state != "absent":
        assert await act(first, ("register", "a"), None) == model.register(KEY, "a", TTL)
    if state == "lapsed":
        await stage.clock.advance(seconds=TTL)
        model.now += TTL
    return model


async def compare(stage: Stage, first: Party, models: list[Registry], what: Any) -> None:
    """The database holds what one of the models holds."""
    listed = await first.list_workers("")
    found = [(one.worker_instance_id, one.worker_id) for one in listed.items]
    told = [
        row["event"]
        for row in await stage.watch.fetch(
            "select event from flowfabric.worker_event where event <> 'heartbeat' order by seq"
        )
    ]
    assert (found, told) in [(model.listed(""), model.told.get(KEY, [])) for model in models], what
    await stage.audit()


@pytest.mark.parametrize("state", STATES)
async def test_two_calls_at_once_leave_what_one_order_leaves(stage: Stage, state: str) -> None:
    first, second = await stage.company(2)
    for _, one, other, ending in (case for case in CASES if case[0] == state):
        what = (state, one, other, ending)
        before = await prepare(stage, first, state)
        await first.begin()
        answer = await act(first, STEPS[one], first._instance)
        # The row was registered by the first party: its own heartbeats name that process.
        waiting = asyncio.ensure_future(act(second, STEPS[other], first._instance))
        await passes_or_waits(stage, second, waiting)
        await first.end(ending)
        reply = await asyncio.wait_for(waiting, PATIENCE)
        mine, theirs = (STEPS[one], answer), (STEPS[other], reply)
        orders = [[theirs]] if ending == "rollback" else [[mine, theirs], [theirs, mine]]
        possible = [model for order in orders if (model := replayed(before, order)) is not None]
        assert possible, (*what, answer, reply)
        await compare(stage, first, possible, what)


async def passes_or_waits(stage: Stage, party: Party, call: asyncio.Future[Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not call.done() and not await stage.watch.fetchval("select pg_blocking_pids($1)", party.pid):
            await asyncio.sleep(0.0005)


@pytest.mark.parametrize("step", ["own heartbeat", "sweep", "claim"])
@pytest.mark.parametrize("held", ["register", "heartbeat", "mark dead"])
async def test_the_work_of_a_worker_waits_for_no_registration(stage: Stage, step: str, held: str) -> None:
    first, second = await stage.company(2)
    await prepare(stage, first, "alive")
    await first.begin()
    await act(first, STEPS[held], None)
    await asyncio.wait_for(act(second, STEPS[step], first._instance), PATIENCE)
    await first.rollback()


async def test_many_processes_that_register_one_instance_are_one_after_another(stage: Stage) -> None:
    parties = await stage.company(8)
    await stage.empty()
    answers = await asyncio.gather(*(act(party, ("register", "a"), None) for party in parties))
    assert sorted(answers) == ["refreshed"] * 7 + ["registered"]
    await stage.empty()
    calls = (
        party.register_worker("a", "x", lanes=["l"], liveness_ttl=timedelta(seconds=TTL), exclusive=True)
        for party in parties
    )
    done = await asyncio.gather(*(settled(call) for call in calls))
    assert sum(isinstance(one, Registered) for one in done) == 1
    assert {one.kind for one in done if isinstance(one, ff.FlowFabricError)} == {"instance_in_use"}
    await stage.audit()


async def test_sweeps_registrations_and_marks_at_random_tell_every_disappearance_once(stage: Stage) -> None:
    parties = await stage.company(6)
    await stage.empty()
    steps = [STEPS[name] for name in ("register", "heartbeat", "mark dead", "sweep", "register", "sweep")]

    async def busy(place: int, party: Party) -> None:
        for turn in range(25):
            await act(party, steps[(place * 7 + turn * 5) % len(steps)], party._instance)

    for _ in range(4):
        await asyncio.gather(*(busy(place, party) for place, party in enumerate(parties)))
        await stage.clock.advance(seconds=TTL)
    await stage.audit()
