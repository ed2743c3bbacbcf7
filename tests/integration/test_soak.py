"""Executions that live for months while the database deletes what is old: nothing is lost, nothing is done twice."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import flowfabric as ff
from flowfabric.testing import Kit, NotReached
from tests import sampling

DAYS = 90


async def test_executions_live_for_ninety_days_and_nothing_is_lost_or_done_twice(kit: Kit, kit_app: ff.App) -> None:
    count, jump = (200, 3) if sampling.is_full() else (18, 15)
    values = random.Random(7)
    leaves: collections.Counter[str] = collections.Counter()
    reports: dict[int, list[int]] = collections.defaultdict(list)

    @kit_app.task(retention="1 hour", retry=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(days=2))))
    async def leaf(ctx: ff.Context, name: str, value: int) -> int:
        if value % 7 == 0 and ctx.retry_count == 0:
            raise ValueError("once more")
        leaves[name] += 1
        return value

    @kit_app.task(retention="1 hour")
    async def branch(ctx: ff.Context, name: str, given: list[int]) -> int:
        """Reads its own flow late, as a node or a child of another."""
        flow = kit_app.flow("twigs")
        flow.map(leaf, [(f"{name}/{n}", value) for n, value in enumerate(given)])
        run = await flow.submit()
        await ctx.sleep(timedelta(days=5))
        return sum((await run.result()).values())

    @kit_app.task
    async def tree(ctx: ff.Context, number: int, given: list[int], pause: int) -> int:
        first = await leaf.submit(f"{number}/first", given[0])
        below = await branch.submit(f"{number}/branch", given)
        flow = kit_app.flow("boughs")
        flow.map(branch, [(f"{number}/bough {n}", given[n:]) for n in range(2)])
        boughs = await flow.submit()
        await ctx.sleep(timedelta(days=pause))
        total = await first.result() + sum((await boughs.result()).values())
        answer = await ctx.wait_for("approval", timeout=timedelta(days=200), default=None)
        assert answer is not None
        await ctx.sleep(timedelta(days=pause))
        total += await below.result() + await first.result()
        await ctx.step("report", reports[number].append, total)
        return total

    kit.use(kit_app)
    expected = {}
    for number in range(count):
        given = [values.randrange(1, 50) for _ in range(3)]
        # first twice, the branch, and the two boughs
        expected[number] = 2 * given[0] + sum(given) + sum(given) + sum(given[1:])
        run = await tree.submit(number, given, values.randrange(1, 30))
        if number % 9 == 8:
            await kit.run_all()
            await run.cancel("not needed")
            del expected[number]
    client = await kit_app.client()
    for day in range(0, DAYS, jump):
        await kit.run_all()
        if day >= DAYS // 2:
            for wait in (await client.waits(limit=1000)).items:
                await client.approve(wait.execution_id)
        await kit.clock.advance(days=jump)
    await kit.run_all()
    assert reports == {number: [total] for number, total in expected.items()}
    assert leaves
    assert set(leaves.values()) == {1}
    engine = await kit.engine()
    assert await engine.audit() == []
    for _ in range(12):  # and in the end everything is deleted
        await kit.clock.advance(days=2)
        await kit.run_all()
    assert (await engine.find_executions()).items == []
    assert (await engine.find_flows()).items == []
    assert await engine.audit() == []


class Decision(msgspec.Struct):
    ok: bool
    comment: str


MISFITS = ({"ok": "yes", "comment": ""}, {"ok": True}, None, 5)
OPS = ("step", "child", "flow", "map", "sleep", "ask")
POINTS = ("step", "submit leaf", "flow twigs", "result", "sleep", "ask", "item", "again")


@pytest.mark.parametrize("seed", sampling.seeds(*range(4)))
async def test_random_handlers_read_the_same_at_every_point_though_children_are_purged_and_answers_refused(
    kit: Kit, kit_app: ff.App, seed: int
) -> None:
    """Every value comes from a counter: what was recorded and ran again anyway would be another one."""
    values = random.Random(seed)
    counter = itertools.count()
    made: dict[str, list[int]] = collections.defaultdict(list)
    programs = [
        [values.choice(OPS) for _ in range(values.randrange(3, 8))] for _ in range(30 if sampling.is_full() else 8)
    ]

    def make(name: str) -> int:
        made[name].append(next(counter))
        return made[name][-1]

    @kit_app.task(retention=timedelta(seconds=1))
    async def leaf(ctx: ff.Context, name: str) -> int:
        return await ctx.step("make", make, name)

    async def read(ctx: ff.Context, op: str, name: str) -> tuple[Any, Any]:
        """Do one operation; return what it read, and what can be read once more at the end."""
        match op:
            case "step":
                return await ctx.step("step", make, name), None
            case "child":
                run = await leaf.submit(name)
                return await run.result(), run
            case "flow":
                flow = kit_app.flow("twigs")
                flow.map(leaf, [(f"{name}/{n}",) for n in range(2)])
                twigs = await flow.submit()
                return sorted((await twigs.result()).values()), twigs
            case "map":
                return await ctx.map(make, [f"{name}/{n}" for n in range(3)], name="item", limit=2), None
            case "ask":
                return (await ctx.wait_for("ask", payload=Decision)).payload.comment, None
            case _:
                await ctx.sleep(timedelta(days=2))
                return None, None

    @kit_app.task(retention=timedelta(days=3650), max_reclaims=10_000)
    async def job(ctx: ff.Context, number: int) -> list[Any]:
        found: list[Any] = []
        late = []
        for place, op in enumerate(programs[number]):
            value, source = await read(ctx, op, f"{number}/{place}")
            found.append(value)
            if source is not None:
                late.append((value, source))
        await ctx.sleep(timedelta(days=3))
        for value, source in late:
            again = await source.result()
            assert value == (sorted(again.values()) if isinstance(again, dict) else again)
        await ctx.step("again", make, f"{number}/again")
        return found

    kit.use(kit_app)
    runs = [await job.submit(number) for number in range(len(programs))]
    sent: dict[int, list[str]] = collections.defaultdict(list)
    crashes = refused = 0
    for day in range(60):
        with contextlib.suppress(NotReached), kit.crash_after(values.choice(POINTS)) as crash:
            await kit.run_all()
        crashes += crash.happened
        for number, run in enumerate(runs):
            for wait in await run.waits():
                good = values.random() < 0.4
                answer = {"ok": True, "comment": f"day {day}"} if good else values.choice(MISFITS)
                await (await kit.engine()).signal_execution(
                    run.execution_id,
                    wait.waitpoint_key,
                    signal_name="go",
                    source_type="raw",
                    payload=msgspec.json.encode(answer),
                )
                if good:
                    sent[number].append(f"day {day}")
                else:
                    refused += 1
        await kit.clock.advance(days=1)
        if all([await run.state() is ff.State.COMPLETED for run in runs]):
            break
    assert crashes
    assert refused
    # A worker that dies may have run a step that was not recorded, of any handler: that one is repeated. So the last
    # value is the recorded one, unless something that was recorded ran again.
    assert sum(len(numbers) - 1 for numbers in made.values()) <= len(runs) * crashes
    for number, (program, run) in enumerate(zip(programs, runs, strict=True)):
        answers = iter(sent[number])
        expected: list[Any] = []
        for place, op in enumerate(program):
            name = f"{number}/{place}"
            match op:
                case "step" | "child":
                    expected.append(made[name][-1])
                case "flow" | "map":
                    of = range(2 if op == "flow" else 3)
                    numbers = [made[f"{name}/{n}"][-1] for n in of]
                    expected.append(sorted(numbers) if op == "flow" else numbers)
                case "ask":
                    expected.append(next(answers))
                case _:
                    expected.append(None)
        assert await run.result() == expected
        assert list(answers) == []
