"""Runs that stop at their budget and continue after a raise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import flowfabric as ff
from tests.integration.conftest import Ledger

PATIENCE = 30.0


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
