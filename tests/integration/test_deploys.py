"""Executions that live for months while their code is changed every day, in both directions, by workers that die."""

from __future__ import annotations

import collections
import contextlib
import random
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import pytest

import flowfabric as ff
from flowfabric.errors import StepsChanged
from flowfabric.testing import Kit, NotReached
from tests import sampling

DAYS = 90
STOPPED = "waiting_for_capable_worker"


class Op(NamedTuple):
    kind: str
    name: str


Key = tuple[str, str, int]
OPS = [
    *(Op("step", name) for name in "abcd"),
    *(Op("wait", name) for name in "vw"),
    Op("sleep", "sleep"),
    Op("submit", "child"),
]


def keys(program: list[Op]) -> list[Key]:
    uses: collections.Counter[Op] = collections.Counter()
    found = []
    for op in program:
        found.append((op.kind, op.name, uses[op]))
        uses[op] += 1
    return found


def edited(program: list[Op], values: random.Random) -> list[Op]:
    """The program after one edit: an operation more, one less, another one, or two that change places."""
    after = list(program)
    place = values.randrange(len(after))
    match values.choice(["append", "insert", "remove", "replace", "swap"]):
        case "append":
            after.append(values.choice(OPS))
        case "insert":
            after.insert(place, values.choice(OPS))
        case "remove" if len(after) > 3:
            del after[place]
        case "replace":
            after[place] = values.choice(OPS)
        case _ if place + 1 < len(after):
            after[place], after[place + 1] = after[place + 1], after[place]
    return after


class Expected:
    """What one execution has done and recorded, and what it does next, by the rule alone."""

    def __init__(self) -> None:
        self.record: dict[Key, Any] = {}  # waits: whether answered; sleeps: until when
        self.effects: list[str] = []
        self.state = "waiting"
        self.fits: list[Op] = []  # the last code that recorded something

    def is_due(self, now: datetime) -> bool:
        """Whether a worker runs it."""
        if self.state == "suspended":
            return all(answered is not False for answered in self.record.values())
        if self.state == "delayed":
            return all(not isinstance(until, datetime) or until <= now for until in self.record.values())
        return self.state in ("waiting", "stopped")

    def run(self, program: list[Op], now: datetime) -> None:
        missing = {key for key in self.record if key[0] != "sleep"}
        for key in keys(program):
            if key not in self.record:
                if missing:
                    self.state = "stopped"
                    return
                self.fits = program
                match key[0]:
                    case "step":
                        self.effects.append(f"{key[1]} {key[2]}")
                        self.record[key] = None
                    case "submit":
                        self.record[key] = None
                    case "wait":
                        self.record[key] = False
                    case "sleep":
                        self.record[key] = now + timedelta(days=2)
            missing.discard(key)
            if self.record[key] is False:
                self.state = "suspended"
                return
            if isinstance(self.record[key], datetime) and self.record[key] > now:
                self.state = "delayed"
                return
        self.state = "failed" if any(use == 0 for _, _, use in missing) else "completed"


class Company:
    """One task, deployed again and again with other code, and everything that its executions did."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.effects: dict[int, list[str]] = collections.defaultdict(list)
        self.children: dict[str, set[Any]] = collections.defaultdict(set)
        self.stops = self.crashes = self.repeated = 0

    def do(self, number: int, effect: str) -> None:
        """A worker that dies may have run a step that it had not recorded: only such a last one is repeated."""
        if self.effects[number][-1:] == [effect]:
            self.repeated += 1
        else:
            self.effects[number].append(effect)

    async def deploy(self, program: list[Op]) -> None:
        await self.kit.aclose()
        app = ff.App("postgresql://nobody@nowhere/nothing")

        @app.task
        async def child(ctx: ff.Context, who: str) -> str:
            self.children[who].add(ctx.execution_id)
            return who

        @app.task(retention=timedelta(days=3650), max_reclaims=10_000)
        async def job(ctx: ff.Context, number: int) -> None:
            for op, (_, _, use) in zip(program, keys(program), strict=True):
                match op.kind:
                    case "step":
                        await ctx.step(op.name, self.do, number, f"{op.name} {use}")
                    case "wait":
                        await ctx.wait_for(op.name)
                    case "sleep":
                        await ctx.sleep(timedelta(days=2))
                    case "submit":
                        await (await child.submit(f"{number}/{use}")).result()

        self.kit.use(app)
        self.job = job

    async def work(self, dies_after: str) -> None:
        """Run everything that is due. The first worker that records this step dies then."""
        with contextlib.suppress(NotReached), self.kit.crash_after(dies_after) as crash:
            while True:
                try:
                    await self.kit.run_all()
                    break
                except StepsChanged:
                    self.stops += 1
        self.crashes += crash.happened


@pytest.mark.parametrize("seed", sampling.seeds(14, 11))
async def test_code_changes_every_day_under_executions_that_live_for_months(kit: Kit, seed: int) -> None:
    count, days = (200, DAYS) if sampling.is_full() else (16, 20)
    values = random.Random(seed)
    company = Company(kit)
    program = [Op("step", "a"), Op("wait", "v"), Op("step", "b"), Op("sleep", "sleep"), Op("step", "c")]
    versions = [program]
    await company.deploy(program)
    runs: list[Any] = []
    expected: list[Expected] = []

    async def look() -> None:
        """Every execution is where the rule says, has done what it says, and what it waits for can be seen."""
        for number, (run, one) in enumerate(zip(runs, expected, strict=True)):
            found = await (await kit.engine()).read_execution(run.execution_id)
            assert found is not None
            state = "stopped" if found.stored_blocking_reason == STOPPED else found.public_state.value
            assert (number, state, company.effects[number]) == (number, one.state, one.effects), (
                repr(program),
                repr(one.record),
                found.blocking_detail,
            )
            assert state != "stopped" or "not asked for" in (found.blocking_detail or "")

    async def a_day() -> None:
        now = await kit.clock.now()
        for number, one in enumerate(expected):
            if one.state == "failed":
                await (await kit.engine()).replay_execution(runs[number].execution_id)
                one.state = "waiting"
            elif one.state == "suspended" and values.random() < 0.5:
                (key,) = [key for key, answered in one.record.items() if answered is False]
                await (await company.job.app.client()).signal(runs[number].execution_id, key[1])
                one.record[key] = True
            if one.is_due(now):
                one.run(program, now)
        await company.work(values.choice(["a", "b", "c", "d", "sleep", "submit child", "result"]))
        await look()
        await kit.clock.advance(days=1)

    for day in range(days):
        dice = values.random()
        if dice < 0.4:
            program = edited(program, values)
            versions.append(program)
        elif dice < 0.6:
            program = values.choice(versions)
        await company.deploy(program)
        for _ in range(count // days + (day < count % days)):
            runs.append(await company.job.submit(len(runs)))
            expected.append(Expected())
        await a_day()
    assert company.stops
    assert company.crashes
    assert company.repeated <= 100 * company.crashes  # a worker runs a hundred at once

    # Whatever waits for other code can continue: with the last code that fitted it.
    for one in expected:
        for _ in range(40):
            if one.state == "completed":
                break
            program = one.fits
            await company.deploy(program)
            await a_day()
        assert one.state == "completed"
    assert {len(ids) for ids in company.children.values()} <= {1}  # nothing is submitted twice
    assert await (await kit.engine()).audit() == []


async def test_old_and_new_workers_side_by_side_keep_to_their_executions_though_they_die(kit: Kit) -> None:
    did: dict[int, list[str]] = collections.defaultdict(list)

    def deploy(version: int, names: tuple[str, ...]) -> ff.Task[[int], int]:
        app = ff.App("postgresql://nobody@nowhere/nothing", name=f"version-{version}")

        @app.task(name="job", version=version, max_reclaims=10_000)
        async def job(ctx: ff.Context, number: int) -> int:
            for name in names:
                await ctx.step(name, did[number].append, f"{version} {name}")
                await ctx.sleep(timedelta(hours=1))
            return version

        kit.use(app)
        return job

    old = deploy(1, ("a", "b", "c"))
    runs = [await old.submit(number) for number in range(6)]
    await kit.run_all()
    new = deploy(2, ("x", "b", "y"))
    runs += [await new.submit(number) for number in range(6, 12)]
    crashes = 0
    for name in ("sleep", "b", "sleep", "b", "sleep"):
        with contextlib.suppress(NotReached), kit.crash_after(name) as crash:
            await kit.run_all()
        crashes += crash.happened
        await kit.clock.advance(hours=1)
    versions = [await kit.run_until_ended(run) for run in runs]
    assert versions[:6] == [1] * 6  # any version runs those that have not started
    for number, version in enumerate(versions):
        steps = {1: ["1 a", "1 b", "1 c"], 2: ["2 x", "2 b", "2 y"]}[version]
        # A worker that dies may repeat a step that it had not recorded.
        assert list(dict.fromkeys(did[number])) == steps
    assert crashes >= 2
