"""Random histories of parents and children against a small model: who lives, who is cancelled, who may be deleted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

import flowfabric as ff
from flowfabric._duties.child_cancel import ChildCancel
from flowfabric.errors import StateError
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import NewExecution
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, StreamPolicy
from flowfabric.values.step import NewStep
from tests import sampling
from tests.sql.cases import World
from tests.support import WORKER, claim_one

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = timedelta(days=900)
BRIEF = ExecutionPolicy(stream_policy=StreamPolicy(retention_ttl=timedelta(hours=1)))
ENDED = ("completed", "failed", "cancelled")


@dataclass(eq=False)
class One:
    """An execution of the model. `children` is what its handler would find submitted; `recorded` what it has read."""

    lane: str
    id: ff.ExecutionId
    parent: One | None
    state: str = "waiting"
    held: Claimed | None = None
    is_gone: bool = False
    children: dict[int, One] = field(default_factory=dict)
    recorded: set[One] = field(default_factory=set)

    @property
    def is_needed(self) -> bool:
        return self.parent is not None and not self.parent.is_gone and self not in self.parent.recorded


class History:
    def __init__(self, engine: ff.Engine, world: World, seed: int) -> None:
        self.engine = engine
        self.world = world
        self.chance = random.Random(seed)
        self.all: list[One] = []

    def some(self, *states: str) -> One | None:
        found = [one for one in self.all if one.state in states and not one.is_gone]
        return self.chance.choice(found) if found else None

    async def submit(self) -> None:
        parent = self.some("active")
        lane = f"l{len(self.all)}"
        item = NewExecution(execution_kind="k", lane_id=lane, policy=BRIEF)
        if parent is None or self.chance.random() < 0.2:
            (made,) = await self.engine.create_many([item])
            parent = None
        else:
            assert parent.held is not None
            n = self.chance.randrange(4)
            made = await self.engine.submit_child(parent.held.handle, "c", n, item)
            if n in parent.children:
                assert made.execution_id == parent.children[n].id
                return
        new = One(lane, made.execution_id, parent)  # type: ignore[union-attr]
        self.all.append(new)
        if parent is not None:
            parent.children[n] = new

    async def start(self) -> None:
        if one := self.some("waiting"):
            one.held = await claim_one(self.engine, **{**WORKER, "lane_id": one.lane, "lease_ttl": LONG})
            assert one.held.execution_id == one.id
            one.state = "active"

    async def end(self) -> None:
        if one := self.some("active"):
            assert one.held is not None
            if self.chance.random() < 0.7:
                await self.engine.complete(one.held.handle, b"1")
                one.state = "completed"
            else:
                await self.engine.fail(one.held.handle, "boom", failure_class="permanent")
                one.state = "failed"

    async def record(self) -> None:
        parent = self.some("active")
        ended = [] if parent is None else [c for c in parent.children.values() if c.state == "completed"]
        if parent is not None and parent.held is not None and ended:
            child = self.chance.choice(ended)
            (answer,) = await self.engine.record_steps(
                [(parent.held.handle, NewStep(name=f"result {child.id}", kind="result", result=b"1"))]
            )
            assert answer is None
            parent.recorded.add(child)

    async def cancel(self) -> None:
        if one := self.some("waiting", "active"):
            keeps = self.chance.random() < 0.2
            await self.engine.cancel(Operator(one.id), "enough", keep_children=keeps)
            one.state = "cancelled"
            if not keeps and self.chance.random() < 0.3:
                await self.replay(one)  # before anything happens to its children
            elif not keeps:
                await ChildCancel(self.engine).run_once()
                self.take(one)

    def take(self, parent: One) -> None:
        for child in self.all:
            if child.parent is parent and child.state not in ENDED:
                child.state = "cancelled"
                self.take(child)

    async def replay(self, one: One | None = None) -> None:
        if one := one or self.some(*ENDED):
            try:
                await self.engine.replay_execution(one.id)
            except StateError as error:
                assert error.kind == "max_replays_exhausted"
                if one.state == "cancelled":
                    await ChildCancel(self.engine).run_once()
                    self.take(one)
                return
            if one.state == "completed":
                one.children, one.recorded = {}, set()
            else:
                one.children = {n: c for n, c in one.children.items() if c.state != "cancelled" or c.is_gone}
            one.state = "waiting"

    async def delete(self) -> None:
        if one := self.some(*ENDED):
            is_refused = one.is_needed and one.parent is not None and one.parent.state != "completed"
            try:
                await self.engine.delete_execution(one.id)
                assert not is_refused
                one.is_gone = True
            except StateError as error:
                assert (error.kind, is_refused) == ("execution_needed", True)
                assert one.parent is not None
                assert str(one.parent.id) in str(error)

    async def days_pass(self) -> None:
        """Enough of them: what is kept only because it was needed is checked once a day."""
        for _ in range(6):
            await self.world.clock.advance(days=1, seconds=1)
            await self.engine.trim_retention()
        while gone := [one for one in self.all if one.state in ENDED and not one.is_gone and not one.is_needed]:
            for one in gone:
                one.is_gone = True

    async def check(self) -> None:
        stored = await self.world.sql.fetch("select id, state, parent_id from flowfabric.execution")
        expected = {(one.id, one.state, one.parent.id if one.parent else None) for one in self.all if not one.is_gone}
        assert {tuple(row) for row in stored} == expected


@pytest.mark.parametrize("seed", sampling.seeds(*range(1, 13)))
async def test_random_histories_of_families_follow_the_model(world: World, seed: int) -> None:
    world.engine.checking = False
    history = History(world.engine, world, seed)
    calls = [history.submit] * 5 + [history.start] * 4 + [history.end] * 2 + [history.record] * 2
    calls += [history.cancel, history.replay, history.delete, history.days_pass]
    for number in range(250):
        await history.chance.choice(calls)()
        await history.check()
        if number % 10 == 0:
            assert await world.engine.audit() == []
    assert {one.state for one in history.all} >= {"completed", "cancelled", "active"}
    assert any(one.is_gone for one in history.all)
