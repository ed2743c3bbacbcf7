"""Random histories of budgets beside a model in Python.

Several workers report, reserve, settle and cancel in one or two budgets, with and without keys; leases end, are lost
and are taken over; an operator raises, lowers, resets, releases and changes modes; the clock moves.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings

import flowfabric as ff
from flowfabric.errors import LeaseLost
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import (
    AlreadyApplied,
    HardBreach,
    ReservationCancelled,
    Reserved,
    SoftBreach,
    Usage,
    UsageOk,
)
from flowfabric.values.ids import BudgetId, ExecutionId, ReservationId
from tests import sampling
from tests.dice import NOTHING, Dice, Step, histories
from tests.sql.test_budgets import make, status
from tests.support import OTHER, Clock, Wipe, claim_one, started

STEPS = (
    "report", "report", "spend", "release", "reserve", "reserve", "settle", "settle", "cancel", "end_lease", "operate",
    "operate",
)  # fmt: skip
SQL: TypeAlias = "asyncpg.Connection[Any]"
DIMENSIONS = ("cost", "tokens", "calls")
LEASE = timedelta(hours=100_000)
PERIOD = 40.0


@dataclass
class Budget:
    """What a budget should know."""

    id: BudgetId
    hard: dict[str, int]
    soft: dict[str, int]
    strict: bool = True
    used: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    overrun: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    breaches: int = 0
    soft_breaches: int = 0
    generation: int = 0
    keys: dict[str, float] = field(default_factory=dict)
    ledger: dict[ExecutionId, list[tuple[int, str, int]]] = field(default_factory=lambda: defaultdict(list))
    next_reset: float | None = None

    def room(self, dimension: str) -> int | None:
        """What is left; None without a limit."""
        if not self.strict or not self.hard.get(dimension):
            return None
        return self.hard[dimension] - self.used.get(dimension, 0) - self.held[dimension]

    def denies(self, amounts: dict[str, int]) -> str | None:
        for dimension in sorted(amounts):
            room = self.room(dimension)
            if room is not None and amounts[dimension] > room:
                return dimension
        return None

    def count(self, amounts: dict[str, int]) -> None:
        for dimension, amount in amounts.items():
            self.used[dimension] = self.used.get(dimension, 0) + amount

    def is_soft(self, amounts: dict[str, int]) -> str | None:
        for dimension in sorted(amounts):
            used = self.used.get(dimension, 0)
            if 0 < self.soft.get(dimension, 0) < used or (not self.strict and 0 < self.hard.get(dimension, 0) < used):
                return dimension
        return None

    def reset(self, now: float) -> None:
        self.used = dict.fromkeys(self.used, 0)
        self.overrun.clear()
        self.generation += 1
        if self.next_reset is not None:
            self.next_reset = now + PERIOD


@dataclass
class Held:
    """A reservation."""

    id: ReservationId
    budgets: list[Budget]
    amounts: dict[str, int]
    on_lost: str
    charged: list[int] | None = None  # the generation of each budget when the lease was lost


class History:
    """The engine and the model, side by side."""

    def __init__(self, engine: ff.Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.dice = Dice()
        self.now = 0.0
        self.budgets: list[Budget] = []
        self.workers: list[Claimed] = []
        self.held: list[dict[ReservationId, Held]] = []

    async def begin(self) -> None:
        for number in range(3):
            hard = {"tokens": 60, "cost": 40} if number < 2 else {}
            soft = {"tokens": 30}
            periodic = number == 1
            made = await make(self.engine, hard, soft, reset_interval=timedelta(seconds=PERIOD if periodic else 0))
            self.budgets.append(Budget(made, dict(hard), dict(soft), next_reset=PERIOD if periodic else None))
        for _ in range(3):
            self.workers.append(await started(self.engine, lease_ttl=LEASE))
            self.held.append({})

    def amounts(self) -> dict[str, int]:
        chosen = self.dice.sample(DIMENSIONS, self.dice.randint(1, 2))
        return {dimension: self.dice.randint(0, 15) for dimension in chosen}

    def some(self) -> list[Budget]:
        return sorted(self.dice.sample(self.budgets, self.dice.randint(1, 2)), key=lambda one: one.id)

    def denied(self, budgets: list[Budget], amounts: dict[str, int]) -> tuple[Budget, str] | None:
        for budget in budgets:
            if (dimension := budget.denies(amounts)) is not None:
                budget.breaches += 1
                return budget, dimension
        return None

    def check(self, answer: Any, budgets: list[Budget], amounts: dict[str, int]) -> None:
        """Whether a report was counted as the model counts it."""
        if (why := self.denied(budgets, amounts)) is not None:
            assert isinstance(answer, HardBreach), answer
            assert (answer.budget_id, answer.dimension) == (why[0].id, why[1])
            return
        for budget in budgets:
            budget.count(amounts)
        self.check_soft(answer, budgets, amounts)

    def check_soft(self, answer: Any, budgets: list[Budget], amounts: dict[str, int]) -> None:
        above = [(budget, dimension) for budget in budgets if (dimension := budget.is_soft(amounts)) is not None]
        for budget, _ in above:
            budget.soft_breaches += 1
        if above:
            assert isinstance(answer, SoftBreach), answer
            assert (answer.budget_id, answer.dimension) == (above[0][0].id, above[0][1])
        else:
            assert isinstance(answer, UsageOk), answer

    async def report(self, number: int) -> None:
        budgets, amounts = self.some(), self.amounts()
        key = f"k{self.dice.randint(0, 3)}" if self.dice.random() < 0.4 else None
        fresh = [one for one in budgets if key is None or one.keys.get(key, -1.0) <= self.now]
        answer = await self.engine.report_usage(
            self.workers[number].handle, Usage(custom=amounts, dedup_key=key), [one.id for one in budgets]
        )
        if not fresh:
            assert isinstance(answer, AlreadyApplied)
            return
        self.check(answer, fresh, amounts)
        if key is not None and not isinstance(answer, HardBreach):
            for budget in fresh:
                budget.keys[key] = self.now + 86_400

    async def spend(self, number: int) -> None:
        budget, amounts = self.dice.choice(self.budgets), self.amounts()
        spender = self.workers[number].execution_id
        answer = await self.engine.record_spend(budget.id, spender, amounts)
        self.check(answer, [budget], amounts)
        if not isinstance(answer, HardBreach):
            budget.ledger[spender] += [(budget.generation, name, amount) for name, amount in amounts.items()]

    async def release(self, number: int) -> None:
        budget, spender = self.dice.choice(self.budgets), self.workers[number].execution_id
        await self.engine.release_budget(budget.id, spender)
        for generation, dimension, amount in budget.ledger.pop(spender, []):
            if generation == budget.generation:
                budget.used[dimension] = max(budget.used[dimension] - amount, 0)

    async def reserve(self, number: int) -> None:
        budgets, amounts = self.some(), self.amounts()
        on_lost = self.dice.choice(["charge", "release"])
        answer = await self.engine.reserve_usage(
            self.workers[number].handle,
            amounts,
            [one.id for one in budgets],
            on_lost=on_lost,  # type: ignore[arg-type]
        )
        if self.denied(budgets, amounts) is not None:
            assert isinstance(answer, HardBreach)
            return
        assert isinstance(answer, Reserved)
        for budget in budgets:
            for dimension, amount in amounts.items():
                budget.held[dimension] += amount
        self.held[number][answer.reservation_id] = Held(answer.reservation_id, budgets, amounts, on_lost)

    async def settle(self, number: int, *, cancel: bool = False) -> None:
        if not self.held[number]:
            return
        one = self.held[number].pop(self.dice.choice(list(self.held[number])))
        handle = self.workers[number].handle
        amounts = {} if cancel else self.amounts()
        answer: Any
        if cancel:
            answer = await self.engine.cancel_reservation(handle, one.id)
            assert answer == ReservationCancelled(reservation_id=one.id, released=one.amounts)
        else:
            answer = await self.engine.settle_usage(handle, one.id, amounts)
        over = False
        for place, budget in enumerate(one.budgets):
            breached = False
            for dimension in sorted({*amounts, *one.amounts}):
                asked, had = amounts.get(dimension, 0), one.amounts.get(dimension, 0)
                used = budget.used.get(dimension, 0)
                if one.charged is None:
                    budget.held[dimension] -= had
                    change = min(asked, had)
                elif one.charged[place] == budget.generation:
                    change = max(min(asked, had) - had, -used)
                else:
                    change = 0
                rest = max(asked - had, 0)
                room = budget.room(dimension)
                if rest and room is not None and rest > max(room - change, 0):
                    budget.overrun[dimension] += rest - max(room - change, 0)
                    rest = max(room - change, 0)
                    over = breached = True
                if dimension in amounts or change + rest:
                    budget.used[dimension] = used + change + rest
            budget.breaches += breached
        if cancel:
            return
        if over:
            assert isinstance(answer, HardBreach), answer
        else:
            self.check_soft(answer, one.budgets, amounts)

    async def end_lease(self, number: int) -> None:
        held = self.workers[number]
        how = self.dice.choice(["complete", "release", "revoke", "revoke"])
        if how == "revoke":
            await self.engine.revoke_lease(held.execution_id)
            with pytest.raises(LeaseLost):
                await self.engine.report_usage(held.handle, {"tokens": 1}, self.budgets[0].id)
        elif how == "complete":
            await self.engine.complete(held.handle, b"")
        else:
            await self.engine.release(held.handle)
        kept: dict[ReservationId, Held] = {}
        for one in self.held[number].values():
            if one.charged is not None:
                kept[one.id] = one
                continue
            charged = how == "revoke" and one.on_lost == "charge"
            for budget in one.budgets:
                for dimension, amount in one.amounts.items():
                    budget.held[dimension] -= amount
                if charged:
                    budget.count(one.amounts)
            if charged:
                one.charged = [budget.generation for budget in one.budgets]
                kept[one.id] = one
        if how == "complete":
            self.workers[number], kept = await started(self.engine, lease_ttl=LEASE), {}
        else:
            self.workers[number] = await claim_one(self.engine, lease_ttl=LEASE, **OTHER)
        self.held[number] = kept

    async def operate(self) -> None:
        budget = self.dice.choice(self.budgets)
        what = self.dice.choice(["reset", "raise", "lower", "soft", "mode", "clock", "clock", "far"])
        if what == "reset":
            await self.engine.reset_budget(budget.id)
            budget.reset(self.now)
        elif what == "raise" and budget.hard.get("tokens"):
            await self.engine.update_budget(budget.id, raise_by={"tokens": 20})
            budget.hard["tokens"] += 20
        elif what == "lower":
            limit = self.dice.randint(0, 60)
            await self.engine.update_budget(budget.id, hard={"tokens": limit, "calls": 30})
            budget.hard |= {"tokens": limit, "calls": 30}
        elif what == "soft":
            budget.soft["cost"] = self.dice.randint(0, 20)
            await self.engine.update_budget(budget.id, soft={"cost": budget.soft["cost"]})
        elif what == "mode":
            budget.strict = self.dice.random() < 0.8
            await self.engine.update_budget(budget.id, enforcement_mode="strict" if budget.strict else "warn")
        elif what in ("clock", "far"):
            seconds = 15.0 if what == "clock" else 86_400.0
            self.now += seconds
            await self.clock.advance(seconds=seconds)
            # The real clock moves too: a period that ends at this very second has ended.
            due = [one for one in self.budgets if one.next_reset is not None and one.next_reset <= self.now]
            assert (await self.engine.reset_due_budgets()).handled == len(due)
            for one in due:
                one.reset(self.now)

    async def step(self, name: str, numbers: list[int]) -> None:
        self.dice.throw(numbers)
        number = self.dice.randrange(len(self.workers))
        if name == "operate":
            await self.operate()
        elif name == "cancel":
            await self.settle(number, cancel=True)
        elif name != NOTHING:
            await getattr(self, name)(number)

    async def compare(self) -> None:
        for budget in self.budgets:
            found = await status(self.engine, budget.id)
            assert found.usage == budget.used
            assert found.held == {name: amount for name, amount in budget.held.items() if amount}
            assert found.overrun == {name: amount for name, amount in budget.overrun.items() if amount}
            assert (found.breach_count, found.soft_breach_count) == (budget.breaches, budget.soft_breaches)
            assert found.generation == budget.generation
            full = [
                name
                for name, limit in sorted(budget.hard.items())
                if budget.strict and 0 < limit <= budget.used.get(name, -1)
            ]
            assert found.exhausted_by == (full[0] if full else None)


@settings(
    max_examples=sampling.examples(80, 10),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=histories(STEPS, 60))
async def test_budgets_do_what_the_model_does(engine: ff.Engine, sql: SQL, clock: Clock, steps: list[Step]) -> None:
    await (await Wipe.of(sql))()
    history = History(engine, clock)
    await history.begin()
    for step in steps:
        await history.step(*step)
        await history.compare()
