"""Waits that a handler gives up, and invalid uses of a wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.values.wait import UsePending

PATIENCE = 60.0


@pytest.fixture
async def app(database: str) -> AsyncIterator[ff.App]:
    async with ff.App(database) as app:
        yield app


async def waits_at(run: ff.Run[Any], *keys: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while {one.waitpoint_key for one in await run.waits()} != set(keys) or await run.state() is ff.State.ACTIVE:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("early", [False, True], ids=["never answered", "answered when it was too late"])
async def test_a_wait_that_lost_a_race_has_lost_it_in_every_later_run(app: ff.App, early: bool) -> None:
    did: list[str] = []

    async def note(what: str) -> None:
        did.append(what)

    @app.task
    async def auction(ctx: ff.Context) -> str:
        bid = asyncio.create_task(ctx.wait_for("bid"))
        closing = asyncio.create_task(ctx.sleep(0.3))
        done, others = await asyncio.wait({bid, closing}, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        which = "sold" if bid in done else "kept"
        await ctx.step(which, note, which)
        await ctx.wait_for("first")
        await ctx.wait_for("second")
        return which

    async with ff.Worker(app):
        run = await auction.submit()
        await waits_at(run, "first")
        if early:
            with pytest.raises(ff.NotFound, match="bid"):
                await run.signal("bid")
        for key in ("first", "second"):
            await waits_at(run, key)
            await run.signal(key)
        assert await run.result(PATIENCE) == "kept"
    assert did == ["kept"]
    (bid,) = [step for step in await run.steps() if step.name == "bid"]
    assert (bid.kind, bid.encoding, bid.outcome) == ("wait", None, "given_up")
    assert await (await app.client()).engine.audit(events=True) == []


async def test_a_waitpoint_that_timed_out_cannot_be_waited_at_again(app: ff.App) -> None:
    @app.task
    async def remind(ctx: ff.Context) -> None:
        waitpoint = await ctx.waitpoint("answer")
        for _ in range(2):
            try:
                await waitpoint.wait(timeout=0.1)
            except ff.NoSignal:
                continue

    async with ff.Worker(app):
        with pytest.raises(ff.TaskFailed, match="it has already timed out"):
            await (await remind.submit()).result(PATIENCE)


async def test_an_execution_has_at_most_a_thousand_open_waitpoints(app: ff.App) -> None:
    @app.task
    async def greedy(ctx: ff.Context) -> None:
        groups = [[f"{group}.{key}" for key in range(256)] for group in range(4)]
        await asyncio.gather(*(ctx.wait_for(ff.any_of(*keys)) for keys in groups))

    async with ff.Worker(app):
        with pytest.raises(ff.TaskFailed, match="too_many_pending_waitpoints"):
            await (await greedy.submit()).result(PATIENCE)


async def test_our_connections_ask_for_the_isolation_they_need_also_behind_a_pooler(
    app: ff.App, database: str, sql: asyncpg.Connection[Any]
) -> None:
    """Behind a pooling proxy a session keeps no setting: in a database with another default each call asks."""
    name = await sql.fetchval("select current_database()")
    engine = (await app.client()).engine
    await engine.create_execution(execution_kind="job")
    await sql.execute(f"alter database {name} set default_transaction_isolation = 'repeatable read'")
    async with await ff.Engine.connect(database, prepared_statements=False, notifications=False) as other:
        claimed = await other.claim(worker_id="w", worker_instance_id="w/1")
        assert claimed is not None
        waitpoint = await other.create_waitpoint(claimed.handle, "k", claimed.handle.lease_ttl)
        await other.suspend(
            claimed.handle, waitpoints=[UsePending(waitpoint.waitpoint_id)], resume_condition=ff.on("k")
        )
        await other.deliver_signal(
            claimed.execution_id, waitpoint.waitpoint_id, waitpoint.token, signal_name="s", source_type="t"
        )
        execution = await other.read_execution(claimed.execution_id)
        assert execution is not None
        assert execution.public_state is ff.State.RESUMABLE
