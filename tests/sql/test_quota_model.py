"""Random histories of quotas beside a model in Python.

Workers claim one or many, and complete, fail, give back, delay or lose what they have; outside callers take and give
slots; an operator raises, lowers, cancels and claims; the clock moves. Each claim returns what the model says.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
from hypothesis import HealthCheck, given, settings

import flowfabric as ff
from flowfabric._duties import Unblock
from flowfabric.values.attempt import Claimed
from flowfabric.values.ids import ExecutionId, QuotaPolicyId
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.quota import Admitted, AlreadyAdmitted, ConcurrencyExceeded, RateExceeded
from tests import sampling
from tests.dice import NOTHING, Dice, Step, histories
from tests.support import OTHER, WORKER, CheckedEngine, Clock, Wipe

SQL: TypeAlias = "asyncpg.Connection[Any]"
STEPS = (
    "submit", "submit", "claim", "claim", "end", "end", "lose", "admit", "release", "update", "cancel", "pass_time",
    "operate",
)  # fmt: skip
WINDOW = 60.0
LEASE = timedelta(days=300)
Pair = tuple[QuotaPolicyId, str]


@dataclass
class Policy:
    id: QuotaPolicyId
    key: bool
    rate: int
    cap: int


@dataclass
class Run:
    """An execution, as far as claims care."""

    id: ExecutionId
    order: tuple[int, int]
    pairs: list[Pair]
    state: str = "ready"  # or away: held back, delayed, ended
    claimed: Claimed | None = None
    lost: bool = False


@dataclass
class Model:
    """Slots and window entries, and what a claim takes."""

    policies: dict[QuotaPolicyId, Policy] = field(default_factory=dict)
    slots: dict[Pair, dict[ExecutionId, float | None]] = field(default_factory=lambda: defaultdict(dict))
    entries: dict[Pair, dict[ExecutionId, float]] = field(default_factory=lambda: defaultdict(dict))
    now: float = 0.0

    def live(self, pair: Pair) -> int:
        return sum(until is None or until > self.now for until in self.slots[pair].values())

    def holds(self, pair: Pair, one: ExecutionId) -> bool:
        until = self.slots[pair].get(one, -1.0)
        return until is None or until > self.now

    def inside(self, pair: Pair) -> set[ExecutionId]:
        return {one for one, at in self.entries[pair].items() if at > self.now - WINDOW}

    def denial(self, pair: Pair, one: ExecutionId) -> str | None:
        policy = self.policies[pair[0]]
        if self.holds(pair, one):
            return None
        inside = self.inside(pair)
        if policy.rate and one not in inside and len(inside) >= policy.rate:
            return "rate"
        if policy.cap and self.live(pair) >= policy.cap:
            return "cap"
        return None

    def admit(self, pair: Pair, one: ExecutionId, until: float | None = None) -> None:
        policy = self.policies[pair[0]]
        if not policy.rate and not policy.cap:
            return
        if not self.holds(pair, one) and policy.rate:
            self.entries[pair][one] = self.now
        self.slots[pair][one] = until

    def take(self, ready: list[Run], limit: int) -> list[Run]:
        taken: list[Run] = []
        for run in sorted(ready, key=lambda run: run.order):
            if len(taken) == limit:
                break
            if run.lost or all(self.denial(pair, run.id) is None for pair in run.pairs):
                for pair in run.pairs:
                    if not run.lost:
                        self.admit(pair, run.id)
                taken.append(run)
        return taken

    def leave(self, run: Run) -> None:
        for pair in run.pairs:
            self.slots[pair].pop(run.id, None)


class History:
    def __init__(self, engine: ff.Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.dice = Dice()
        self.model = Model()
        self.runs: list[Run] = []
        self.outside: list[tuple[Pair, ExecutionId]] = []

    async def begin(self) -> None:
        for number, (key, rate, cap) in enumerate([(None, 0, 2), ("t", 0, 1), (None, 4, 0), ("t", 3, 2), (None, 0, 0)]):
            made = await self.engine.create_quota_policy(
                name=f"p{number}", key=key, max_requests_per_window=rate, max_concurrent=cap
            )
            self.model.policies[made.quota_policy_id] = Policy(made.quota_policy_id, key is not None, rate, cap)

    async def step(self, name: str, numbers: list[int]) -> None:
        self.dice.throw(numbers)
        if name != NOTHING:
            await getattr(self, name)()
            await self.check()

    async def submit(self) -> None:
        chosen = self.dice.sample(list(self.model.policies), self.dice.choice([0, 1, 1, 2]))
        tag = self.dice.choice("ab")
        priority = self.dice.randrange(2)
        made = await self.engine.create_execution(
            execution_kind="k",
            priority=priority,
            tags={"t": tag},
            policy=ExecutionPolicy(quota_policy_ids=tuple(chosen)),
        )
        pairs = [(one, tag if self.model.policies[one].key else "default") for one in chosen]
        self.runs.append(Run(made.execution_id, (-priority, len(self.runs)), pairs))

    async def claim(self) -> None:
        for run in self.runs:
            if run.claimed is None or run.lost:
                record = await self.engine.read_execution(run.id)
                assert record is not None
                run.state = "ready" if record.public_state in ("waiting", "resumable") or run.lost else "away"
        limit = self.dice.choice([1, 2, 20])
        expected = self.model.take([run for run in self.runs if run.state == "ready"], limit)
        who = self.dice.choice([WORKER, OTHER])
        claimed = await self.engine.claim_many(**who, limit=limit, lease_ttl=LEASE)
        assert [one.execution_id for one in claimed] == [run.id for run in expected]
        for run, one in zip(expected, claimed, strict=True):
            run.state, run.claimed, run.lost = "active", one, False

    def running(self) -> Run | None:
        found = [run for run in self.runs if run.state == "active" and not run.lost]
        return self.dice.choice(found) if found else None

    async def end(self) -> None:
        if (run := self.running()) is None:
            return
        assert run.claimed is not None
        match self.dice.randrange(5):
            case 0:
                await self.engine.release(run.claimed.handle)
            case 1:
                await self.engine.delay(run.claimed.handle, timedelta(seconds=1))
                await self.clock.advance(seconds=2)
                self.model.now += 2
                await self.engine.promote_delayed(run.id)
            case 2:
                retry = ff.RetryPolicy(max_retries=100, backoff=ff.Fixed(timedelta(seconds=1)))
                await self.engine.fail(run.claimed.handle, "boom", retry_policy=retry)
                await self.clock.advance(seconds=2)
                self.model.now += 2
                await self.engine.promote_delayed(run.id)
            case _:
                await self.engine.complete(run.claimed.handle)
        self.model.leave(run)
        run.state, run.claimed = "away", None

    async def lose(self) -> None:
        if (run := self.running()) is not None:
            await self.engine.revoke_lease(run.id)
            run.lost = True

    async def cancel(self) -> None:
        left = [run for run in self.runs if run.state in ("active", "ready")]
        if left:
            run = self.dice.choice(left)
            try:
                await self.engine.cancel(Operator(run.id), "enough")
            except ff.FlowFabricError:
                return
            self.model.leave(run)
            run.state, run.claimed, run.lost = "away", None, False

    async def operate(self) -> None:
        """An operator claims without being asked for limits."""
        for run in self.runs:
            record = await self.engine.read_execution(run.id)
            if record is not None and record.public_state == "waiting" and self.dice.random() < 0.3:
                leased = await self.engine.issue_grant_and_claim(run.id)
                assert leased is not None
                for pair in run.pairs:
                    if self.model.policies[pair[0]].rate or self.model.policies[pair[0]].cap:
                        self.model.slots[pair][run.id] = None
                run.state, run.lost = "operated", False
                return

    async def admit(self) -> None:
        policy = self.dice.choice(list(self.model.policies.values()))
        if not policy.rate and not policy.cap:
            return
        pair = (policy.id, self.dice.choice("ab") if policy.key else "default")
        known = [one for at, one in self.outside if at == pair]
        one = self.dice.choice([*known, self.engine.mint_id()])
        answer = await self.engine.check_admission(
            policy.id, one, dimension=pair[1], rate_limit=policy.rate, concurrency_cap=policy.cap
        )
        if self.model.holds(pair, one):
            assert answer == AlreadyAdmitted()
            return
        match self.model.denial(pair, one):
            case "rate":
                assert isinstance(answer, RateExceeded)
            case "cap":
                assert answer == ConcurrencyExceeded()
            case _:
                assert answer == Admitted()
                self.model.entries[pair][one] = self.model.now
                self.model.slots[pair][one] = self.model.now + WINDOW
                self.outside.append((pair, one))

    async def release(self) -> None:
        if self.outside:
            pair, one = self.dice.choice(self.outside)
            await self.engine.release_admission(pair[0], one)
            self.model.slots[pair].pop(one, None)

    async def update(self) -> None:
        policy = self.dice.choice(list(self.model.policies.values()))
        policy.cap = self.dice.choice([1, 2, 3]) if policy.cap else 0
        policy.rate = self.dice.choice([2, 4, 6]) if policy.rate else 0
        await self.engine.update_quota_policy(policy.id, max_concurrent=policy.cap, max_requests_per_window=policy.rate)

    async def pass_time(self) -> None:
        seconds = self.dice.choice([7.0, 23.0, 61.0])
        await self.clock.advance(seconds=seconds)
        self.model.now += seconds
        await self.engine.unblock_limited()
        await self.engine.reconcile_quotas()
        await Unblock(self.engine).run_once()
        await self.check_nothing_is_left_behind()

    async def check(self) -> None:
        for policy in self.model.policies.values():
            found = {one.key: one for one in (await self.engine.list_quota_keys(policy.id)).items}
            for pair in [pair for pair in self.model.slots if pair[0] == policy.id]:
                seen = found.get(pair[1])
                assert (seen.active if seen else 0) == self.model.live(pair), pair
                assert (seen.admitted if seen else 0) == len(self.model.inside(pair)), pair

    async def check_nothing_is_left_behind(self) -> None:
        """After a pass: as many may be claimed as there is room for, or none waits."""
        for policy in self.model.policies.values():
            for one in (await self.engine.list_quota_keys(policy.id)).items:
                pair = (policy.id, one.key)
                room = min(
                    policy.cap - self.model.live(pair) if policy.cap else 1000,
                    policy.rate - len(self.model.inside(pair)) if policy.rate else 1000,
                )
                if one.waiting and room > 0:
                    ready = 0
                    for run in self.runs:
                        record = await self.engine.read_execution(run.id)
                        ready += pair in run.pairs and record is not None and record.public_state == "waiting"
                    assert ready >= room, (pair, room, ready)


@settings(
    max_examples=sampling.examples(80, 10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=histories(STEPS, 70))
async def test_claims_and_admissions_are_those_of_the_model(
    engine: CheckedEngine, sql: SQL, clock: Clock, steps: list[Step]
) -> None:
    await (await Wipe.of(sql))()
    history = History(engine, clock)
    await history.begin()
    for step in steps:
        await history.step(*step)
