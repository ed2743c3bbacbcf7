"""`ctx.map`: a step for each item, some at a time."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest

import flowfabric as ff
from flowfabric.testing import Kit
from tests.integration.conftest import Ledger

AT_ONCE = ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0))


class Crowd:
    """Counts how many are inside at the same time."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.lock = threading.Lock()
        self.full = threading.Event()

    def enter(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1


async def test_results_come_in_the_order_of_the_items_and_no_more_than_the_limit_run_at_a_time(
    kit: Kit, kit_app: ff.App
) -> None:
    crowd = Crowd()

    async def fetch(n: int) -> int:
        crowd.enter()
        for _ in range(20 - n):  # later items are faster
            await asyncio.sleep(0)
        crowd.leave()
        return n * n

    @kit_app.task
    async def many(ctx: ff.Context, limit: int) -> list[int]:
        return await ctx.map(fetch, range(20), limit=limit)

    for limit in (1, 5, 100):
        crowd.most = 0
        run = await many.submit(limit)
        assert await kit.run_until_ended(run) == [n * n for n in range(20)]
        assert crowd.most == min(limit, 20)
    assert {step.name for step in await run.steps()} == {f"fetch {n}" for n in range(20)}


async def test_the_first_error_cancels_the_rest_and_what_was_recorded_stays(
    kit: Kit, kit_app: ff.App, did: Ledger
) -> None:
    async def fetch(n: int) -> int:
        did.append(f"fetch {n}")
        if n == 2 and did.count("fetch 2") == 1:
            raise ValueError("not today")
        if n == 3 and did.count("fetch 3") == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                did.append("3 was cancelled")
                raise
        return n

    @kit_app.task(retry=AT_ONCE)
    async def many(ctx: ff.Context) -> list[int]:
        try:
            return await ctx.map(fetch, range(6), limit=2)
        except ValueError:
            did.append("raised")
            raise

    # 0 and 1 are recorded; 2 fails while 3 runs; 4 and 5 were never begun.
    assert await kit.run_until_ended(await many.submit()) == list(range(6))
    at = did.index("raised")
    assert sorted(did[:at]) == ["3 was cancelled", "fetch 0", "fetch 1", "fetch 2", "fetch 3"]
    assert sorted(did[at + 1 :]) == ["fetch 2", "fetch 3", "fetch 4", "fetch 5"]


async def test_a_map_is_not_run_again_after_a_wait_and_a_second_one_has_steps_of_its_own(
    kit: Kit, kit_app: ff.App, did: Ledger
) -> None:
    @kit_app.task
    async def many(ctx: ff.Context) -> list[str]:
        note = did.entry("note", "x")
        first = await ctx.map(note, "ab", name="note")
        await ctx.sleep("3 days")
        return [*first, *await ctx.map(note, "c", name="note")]

    assert await kit.run_until_ended(await many.submit()) == ["x"] * 3
    assert len(did) == 3


async def test_a_map_survives_a_crash_at_every_step(kit: Kit, kit_app: ff.App) -> None:
    async def double(n: int) -> int:
        return 2 * n

    @kit_app.task
    async def many(ctx: ff.Context) -> list[int]:
        return await ctx.map(double, range(3), limit=2)

    report = await kit.crash_everywhere(many)
    assert [crash.result for crash in report.crashes] == [[0, 2, 4]] * 3


async def test_a_synchronous_handler_maps_in_threads_even_if_handlers_hold_all_of_the_workers(
    app: ff.App,
) -> None:
    crowd = Crowd()
    both = threading.Barrier(2, timeout=30)

    def meet(n: int) -> int:
        crowd.enter()
        both.wait()  # passes only if two run at the same time
        crowd.leave()
        return n + 1

    @app.task
    def many(ctx: ff.SyncContext) -> list[int]:
        return ctx.map(meet, range(4), limit=2)

    async with ff.Worker(app, concurrency=1):
        assert await (await many.submit()).result(60) == [1, 2, 3, 4]
    assert crowd.most == 2


async def test_an_error_in_a_thread_is_raised_in_the_synchronous_handler(kit: Kit, kit_app: ff.App) -> None:
    def check(n: int) -> int:
        if n == 1:
            raise LookupError(f"no {n}")
        return n

    @kit_app.task
    def many(ctx: ff.SyncContext) -> str:
        try:
            ctx.map(check, range(3), limit=1)
        except LookupError as error:
            return str(error)
        return ""

    assert await kit.run_until_ended(await many.submit()) == "no 1"


async def test_what_cannot_be_mapped_is_refused_by_name(kit: Kit, kit_app: ff.App) -> None:
    def same(n: int) -> int:
        return n

    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (lambda n: n, [1], {}, "name"),
        (functools.partial(same), [1], {}, "name"),
        (same, 5, {}, "items"),
        (same, None, {}, "items"),
        *((same, [1], {"limit": limit}, "limit") for limit in (0, -1, True, 1.0, None, "5")),
        (same, [1], {"name": "n" * 300}, "name"),
        ("same", [1], {"name": "x"}, "fn"),
    ]

    @kit_app.task
    async def many(ctx: ff.Context) -> list[str]:
        found = []
        for fn, items, options, _ in cases:
            with pytest.raises(ff.InvalidInput) as refused:
                await ctx.map(fn, items, **options)
            found.append(str(refused.value.field))
        assert await ctx.map(same, []) == []
        return found

    assert await kit.run_until_ended(await many.submit()) == [field for *_, field in cases]
