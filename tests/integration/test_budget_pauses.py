"""Runs that stop at their budget and continue after a raise."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from tests.integration.conftest import Ledger

PATIENCE = 60.0


def worker(app: ff.App, **options: Any) -> ff.Worker:
    return ff.Worker(app, **{"grace": 5, "poll": 0.2, **options})


async def until(run: ff.Run[Any], state: ff.State) -> None:
    async with asyncio.timeout(PATIENCE):
        while await run.state() is not state:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["report", "spend", "in a step", "sync", "sync in a step"])
async def test_a_run_stops_at_its_budget_and_continues_where_it_stopped_after_a_raise(
    app: ff.App, did: Ledger, how: str
) -> None:
    app.budget("team", hard={"tokens": 100})

    @app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> int:
        await ctx.step("first", did.entry("first"))
        await ctx.usage(tokens=80)

        async def ask() -> int:
            did.append("ask")
            await ctx.usage(tokens=50)
            return 1

        if how == "report":
            await ctx.usage(tokens=50)
        elif how == "spend":
            async with ctx.spend(tokens=60) as spend:
                spend.settle(tokens=50)
        else:
            await ctx.step("ask", ask)
        did.append("end")
        return 1

    @app.task(budgets=["team"], name="sync")
    def sync_agent(ctx: ff.SyncContext) -> int:
        ctx.step("first", did.entry("first"))
        ctx.usage(tokens=80)

        def ask() -> int:
            did.append("ask")
            ctx.usage(tokens=50)
            return 1

        if how == "sync":
            with ctx.spend(tokens=60) as spend:
                spend.settle(tokens=50)
        else:
            ctx.step("ask", ask)
        did.append("end")
        return 1

    async with worker(app):
        run = await (sync_agent if how.startswith("sync") else agent).submit()
        await until(run, ff.State.RATE_LIMITED)
        found = await run.get()
        assert found.blocking_reason is not None
        assert found.blocking_reason.value == "waiting_for_budget"
        assert "end" not in did
        client = await app.client()
        assert (await client.budget("team")).usage == {"tokens": 80}
        await client.raise_budget("team", tokens=10)
        assert await run.state() is ff.State.RATE_LIMITED, "not enough for what it needs"
        await client.raise_budget("team", tokens=50)
        assert await asyncio.wait_for(run.result(), PATIENCE) == 1
    client = await app.client()
    assert did.count("first") == 1
    assert did.count("end") == 1
    assert (await client.budget("team")).usage == {"tokens": 130}
    assert (await client.budget("team")).held.get("tokens", 0) == 0
    assert [one.attempt_index for one in await run.attempts()] == [0]


@pytest.mark.parametrize(("cost", "pauses"), [(30, False), (80, True)])
async def test_a_pause_waits_for_the_steps_of_other_branches_whose_results_it_would_lose(
    app: ff.App, did: Ledger, cost: int, pauses: bool
) -> None:
    app.budget("team", hard={"tokens": 100})

    @app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> int:
        begun = asyncio.Event()

        async def ask() -> int:
            did.append("ask")
            begun.set()
            while not (await (await app.client()).budget("team")).breach_count:
                await asyncio.sleep(0.005)
            for _ in range(100):  # the branch that does not fit is about to pause
                await asyncio.sleep(0)
            return cost

        async def paid() -> None:
            async with ctx.spend(tokens=80) as spend:
                spend.settle(tokens=await ctx.step("ask", ask))

        async def reporting() -> None:
            if "ask" not in did:
                await begun.wait()
            await ctx.usage(tokens=60)

        await asyncio.gather(paid(), reporting())
        return 1

    async with worker(app):
        run = await agent.submit()
        if pauses:
            await until(run, ff.State.RATE_LIMITED)
            assert (await (await app.client()).budget("team")).usage == {"tokens": 80}
            await (await app.client()).raise_budget("team", tokens=40)
        assert await asyncio.wait_for(run.result(), PATIENCE) == 1
    assert did == ["ask"]
    assert (await (await app.client()).budget("team")).usage == {"tokens": cost + 60}


async def test_a_reset_lets_the_whole_backlog_continue(app: ff.App) -> None:
    app.budget("team", hard={"tokens": 10})

    @app.task(budgets=["team"])
    async def agent(ctx: ff.Context, n: int) -> int:
        await ctx.usage(tokens=10)
        return n

    async with worker(app, concurrency=4):
        runs = await agent.submit_many(range(3))
        client = await app.client()
        async with asyncio.timeout(PATIENCE):
            while sum([await run.state() is ff.State.COMPLETED for run in runs]) < 1:
                await asyncio.sleep(0.005)
            for done in (2, 3):
                await client.reset_budget("team")
                while sum([await run.state() is ff.State.COMPLETED for run in runs]) < done:
                    await asyncio.sleep(0.005)
    assert (await (await app.client()).budget("team")).reset_count == 2


async def test_a_run_with_a_budget_of_its_own_shares_it_with_its_children(app: ff.App) -> None:
    @app.task
    async def child(ctx: ff.Context, tokens: int) -> int:
        return (await ctx.usage(tokens=tokens)).remaining["tokens"]

    @app.task
    async def free(ctx: ff.Context) -> dict[str, int]:
        return (await ctx.usage(tokens=1_000)).remaining

    @app.task
    async def agent(ctx: ff.Context) -> list[int]:
        await (await free.options(inherit_budgets=False).submit()).result()
        left = [await (await child.submit(40)).result() for _ in range(2)]
        flow = app.flow("parts")
        flow.add(child, 15)
        return [*left, *(await (await flow.submit()).result()).values()]

    async with worker(app):
        run = await agent.options(budget=ff.Budget(tokens=90, soft={"tokens": 80})).submit()
        async with asyncio.timeout(PATIENCE):
            while (found := await run.budget()) is None or found.usage.get("tokens") != 80 or found.breach_count == 0:
                await asyncio.sleep(0.005)
        assert (found.hard_limits, found.soft_limits) == ({"tokens": 90}, {"tokens": 80})
        changed = await run.raise_budget(tokens=+50)
        assert changed.hard_limits == {"tokens": 140}
        assert await asyncio.wait_for(run.result(), PATIENCE) == [50, 10, 45]
        usage = await run.usage()
        assert usage.by_budget[run.id] == {"tokens": 95}


async def test_a_budget_of_its_own_comes_with_each_way_to_submit(app: ff.App, database: str) -> None:
    @app.task
    async def agent(ctx: ff.Context, n: int) -> int:
        return (await ctx.usage(tokens=n)).remaining["tokens"]

    limited = agent.options(budget=ff.Budget(tokens=10))
    flow = app.flow("whole")
    node = flow.add(limited, 3)
    async with worker(app):
        runs = [await limited.submit(1), *await limited.submit_many([2, 2])]
        connection = await asyncpg.connect(database)
        async with connection.transaction():
            runs.append(await limited.submit_in(connection, 4))
        await connection.close()
        runs.append((await flow.submit())[node])
        assert [await asyncio.wait_for(run.result(), PATIENCE) for run in runs] == [9, 8, 8, 6, 7]


@pytest.mark.parametrize("how", ["submit", "in a transaction", "in a handler"])
async def test_a_flow_with_a_budget_shares_it_among_its_nodes(app: ff.App, database: str, how: str) -> None:
    @app.task
    async def part(ctx: ff.Context, tokens: int) -> int:
        return (await ctx.usage(tokens=tokens)).remaining["tokens"]

    @app.task
    async def grow(ctx: ff.Context) -> int:
        flow = ctx.flow()
        flow.add(part, 10, name="later")
        await flow.submit()
        return (await ctx.usage(tokens=10)).remaining["tokens"]

    def built() -> ff.Flow:
        flow = app.flow("team", budget=ff.Budget(tokens=100))
        flow.add(grow, after=flow.add(part, 50))
        return flow

    @app.task
    async def outer(ctx: ff.Context) -> dict[str, int]:
        return await (await built().submit()).result()

    async with worker(app):
        if how == "in a handler":
            found = await asyncio.wait_for((await outer.submit()).result(), PATIENCE)
            assert found["part"] == 50
            assert found["grow"] in (30, 40), "of the same budget, whether the later node was faster or not"
            return
        if how == "submit":
            run = await built().submit()
        else:
            connection = await asyncpg.connect(database)
            async with connection.transaction():
                run = await built().submit_in(connection)
            await connection.close()
        results = await asyncio.wait_for(run.result(), PATIENCE)
        assert results["part"] == 50
        assert sorted([results["grow"], results["later"]]) == [30, 40]
        budget = await run.budget()
        assert budget is not None
        assert budget.usage == {"tokens": 70}
        assert (await run.raise_budget(tokens=5)).hard_limits == {"tokens": 105}


def test_a_wrong_budget_of_a_flow_is_refused() -> None:
    with pytest.raises(ff.InvalidInput, match=r"budget: got int; allowed: an ff\.Budget or None"):
        ff.App().flow("team", budget=5)  # type: ignore[arg-type]  # the refusal under test
