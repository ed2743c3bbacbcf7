"""Handlers made at random, whose branches share the names of their steps, children and waits, and are cut off often.

Every branch passes itself into each call and gets itself back: in no run does a branch get what belongs to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.middleware import Middleware, Run, Submission
from flowfabric.testing import Kit
from flowfabric.testing.faults import Crash, Point
from flowfabric.values.lease import Fence, Handle
from flowfabric.values.step import NewStep
from flowfabric.worker.durable.order import Order
from flowfabric.worker.durable.running import Running
from tests import sampling
from tests.each import each

_LATENCY = 0.004
SEEDS = sampling.seeds(*range(1, 40))
KINDS = [
    *["own", "child", "result", "sleep", "now", "wait", "map", "emit", "progress", "usage", "fail"],
    *["shared"] * 4,
]


class _Crashes(Crash):
    """Kills the worker after some of the steps."""

    def __init__(self, dice: random.Random, share: float, most: int) -> None:
        super().__init__("after", "", None, None, most)
        self._dice = dice
        self._share = share

    def strikes(self, when: str, point: Point) -> bool:
        if not point.task.startswith("parent") or self.happened >= self.times or self._dice.random() >= self._share:
            return False
        self.happened += 1
        return True


async def _play(kit: Kit, seed: int) -> None:
    dice, delays = random.Random(seed), random.Random(seed + 1)
    app = ff.App("postgresql://nobody@nowhere/nothing")
    kit.use(app)
    programs = [[dice.choice(KINDS) for _ in range(dice.randint(1, 6))] for _ in range(dice.randint(2, 5))]
    how = dice.choice(("gather", "group", "nested"))

    def delay() -> float:
        return delays.choice((0, 0, delays.uniform(0, _LATENCY)))

    async def echo(value: str) -> str:
        if pause := delay():
            await asyncio.sleep(pause)
        return value

    async def fail(value: str) -> str:
        raise ValueError(await echo(value))

    # The kit works for the apps of earlier seeds too, so each seed has tasks of its own.
    @app.task(name=f"child {seed}")
    async def child(value: str) -> str:
        return await echo(value)

    @app.task(name=f"parent {seed}")
    async def parent(ctx: ff.Context) -> str:
        async def send(key: str) -> None:
            await asyncio.sleep(delay())
            await (await app.client()).signal(ctx.execution_id, key, payload=key)

        async def one(branch: int) -> None:
            runs: list[tuple[str, Any]] = []
            for n, kind in enumerate(programs[branch]):
                own = f"{branch}.{n}"
                if kind == "shared":
                    assert await ctx.step("shared", echo, own) == own, f"{own}: shared"
                elif kind == "own":
                    assert await ctx.step(f"own {own}", echo, own) == own, f"{own}: own"
                elif kind == "child":
                    runs.append((own, await child.submit(own)))
                elif kind == "result":
                    run = runs.pop() if runs else (own, await child.submit(own))
                    found = await run[1].result()
                    assert found == run[0], f"{own}: {found} is the result of {run[0]}"
                elif kind == "sleep":
                    await ctx.sleep(delay())
                elif kind == "now":
                    await ctx.now()
                elif kind == "emit":
                    await ctx.emit(own, type="note", durability_mode="durable")
                elif kind == "progress":
                    await ctx.progress(1)
                elif kind == "usage":
                    await ctx.usage(tokens=1)
                elif kind == "fail":
                    try:
                        await ctx.step("shared", fail, own)
                    except ValueError as error:
                        found = error.args[0]
                    assert found == own, f"{own}: {found} failed"
                elif kind == "map":
                    values = [f"{own}.{i}" for i in range(3)]
                    assert await ctx.map(echo, values, limit=2, name=f"map {own}") == values
                else:
                    wait = await ctx.waitpoint(own, payload=str, name="answer")
                    await ctx.step(f"send {own}", send, own)
                    found = (await wait.wait()).payload
                    assert found == own, f"{own}: {found} is the answer"

        branches = range(len(programs))
        if how == "gather":
            await asyncio.gather(*map(one, branches))
        elif how == "group":
            async with asyncio.TaskGroup() as group:
                for branch in branches:
                    group.create_task(one(branch))
        else:

            async def pair(first: int) -> None:
                await asyncio.gather(*map(one, branches[first : first + 2]))
                assert await ctx.step("shared", echo, f"pair {first}") == f"pair {first}"

            await asyncio.gather(*map(pair, branches[::2]))
        return "done"

    crashes = _Crashes(dice, dice.choice((0, 0.1, 0.3)), 2)
    kit._faults.crashes.append(crashes)
    try:
        if dice.random() < 0.4:
            with kit.replay_always():
                assert await kit.run_inline(parent) == "done"
        else:
            assert await kit.run_inline(parent) == "done"
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {how} {programs}: {type(error).__name__} {error}") from error
    finally:
        kit._faults.crashes.remove(crashes)


@each("seed", SEEDS)
async def test_branches_never_get_what_belongs_to_another(kit: Kit, seed: int) -> None:
    await _play(kit, seed)


async def test_branches_ask_in_their_order_while_the_record_is_read(
    kit: Kit, kit_app: ff.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = loads = 0
    moved = asyncio.Event()
    load = Running._load

    async def load_slowly(running: Running) -> None:
        nonlocal loads
        await load(running)
        loads += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(moved.wait(), 0.2)

    async def echo(value: str) -> str:
        return value

    @kit_app.task(name="job")
    async def job(ctx: ff.Context) -> list[str]:
        nonlocal runs
        runs += 1
        moved.clear()

        async def one(value: str) -> str:
            if value == "moves":
                await ctx.progress(1)
                while loads < runs - 1:
                    await ctx.progress(1)
                moved.set()
            return await ctx.step("shared", echo, value)

        return await asyncio.gather(one("asks"), one("moves"))

    monkeypatch.setattr(Running, "_load", load_slowly)
    with kit.replay_always():
        assert await kit.run_inline(job) == ["asks", "moves"]


async def _echo(value: str) -> str:
    return value


def _with_one_branch(kit: Kit) -> Any:
    app = ff.App("postgresql://nobody@nowhere/nothing")
    kit.use(app)

    @app.task
    async def child() -> None: ...

    @app.task
    async def parent(ctx: ff.Context) -> str:
        await ctx.sleep(0)
        run = await child.submit()
        await ctx.step("first", _echo, "a")
        await ctx.now()
        await ctx.emit("a", type="note", durability_mode="durable")
        await run.result()
        return await ctx.step("second", _echo, "b")

    return parent


@each("again", [False, True])
async def test_a_handler_with_one_branch_never_waits_for_a_turn(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    turns: list[Any] = []
    monkeypatch.setattr(Order, "_queued", lambda _self, turn: turns.append(turn))
    parent = _with_one_branch(kit)
    if again:
        with kit.replay_always():
            assert await kit.run_inline(parent) == "b"
    else:
        assert await kit.run_inline(parent) == "b"
    assert turns == []


async def test_the_end_of_a_sleep_is_recorded_without_a_call_of_its_own(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[tuple[str, int | None]]] = []
    record_steps = ff.Engine.record_steps

    async def noted(
        engine: ff.Engine, items: Sequence[tuple[Handle | Fence, NewStep]]
    ) -> list[datetime | FlowFabricError | None]:
        calls.append([(step.kind, step.place) for _, step in items])
        return await record_steps(engine, items)

    monkeypatch.setattr(ff.Engine, "record_steps", noted)
    assert await kit.run_inline(_with_one_branch(kit)) == "b"
    assert calls[:3] == [[("sleep", None)], [("sleep", 1), ("step", 2)], [("now", None)]]
    assert [kind for call in calls[3:] for kind, _ in call] == ["result", "step"]


class _Approved(Middleware):
    """Asks before each submission, in a step of the handler or a task of its own that takes one."""

    def __init__(self) -> None:
        self.in_task = False
        self.ctx: ff.Context | None = None

    async def submit(self, submission: Submission, proceed: Callable[[Submission], Awaitable[Run]]) -> Run:
        if self.ctx is not None:
            asked = self.ctx.step("approve", _echo, submission.kind)
            assert await (asyncio.create_task(asked) if self.in_task else asked) == submission.kind
        return await proceed(submission)


@each("in_task", [False, True])
async def test_a_call_may_contain_steps(kit: Kit, in_task: bool) -> None:
    approved = _Approved()
    app = ff.App("postgresql://nobody@nowhere/nothing", middleware=[approved])
    kit.use(app)

    @app.task(name="child")
    async def child(value: str) -> str:
        return value

    @app.task(name="parent")
    async def parent(ctx: ff.Context) -> list[str]:
        approved.ctx, approved.in_task = ctx, in_task

        async def one(value: str) -> str:  # no wait for the child: the handler would run again, without the middleware
            await child.submit(value)
            return value

        try:
            return await asyncio.gather(one("a"), one("b"))
        finally:
            approved.ctx = None

    assert await kit.run_inline(parent) == ["a", "b"]
