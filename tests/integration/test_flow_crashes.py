"""Processes that run the duties of flows, really killed: between two calls, inside one, and before its response.

Inside means inside the transaction: a table it has to write is locked, the process is killed while its call waits for
it, and then its call is either ended with it or finishes on the server without a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.flow import FlowCancelHeader
from flowfabric.values.joins import AnyOf, Quorum
from tests import sampling
from tests.flow_rules import check_settled, settle_flows
from tests.sql.flowing import Flow, fan_in, hold, submitted
from tests.support import WORKER, Clock, until_blocked

PATIENCE = 60.0
# Calls come in as lines, answers go out; it ends when it is killed.
PROGRAM = """
import asyncio, json, sys
import flowfabric as ff

async def main():
    engine = await ff.Engine.connect(sys.argv[1], notifications=False)
    worker = dict(worker_id="pool", worker_instance_id="victim")
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        call, given = json.loads(line)
        if call in ("complete", "fail"):
            claimed = await engine.claim(**worker, kinds=[given["kind"]])
            if call == "complete":
                await engine.complete(claimed.handle, b"done")
            else:
                await engine.fail(claimed.handle, "boom", failure_class="permanent")
        else:
            await getattr(engine, call)(**given)
        print("done", flush=True)

asyncio.run(main())
"""


class Victim:
    """A process that makes one call after the other until it is killed."""

    def __init__(self, process: asyncio.subprocess.Process, sql: asyncpg.Connection[Any], dsn: str) -> None:
        self._process = process
        self._sql = sql
        self._dsn = dsn

    async def heard(self, word: str) -> None:
        assert self._process.stdout is not None
        assert await asyncio.wait_for(self._process.stdout.readline(), PATIENCE) == f"{word}\n".encode()

    async def begin(self, call: str, given: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([call, given])}\n".encode())
        await self._process.stdin.drain()

    async def do(self, call: str, given: dict[str, Any], times: int = 1) -> None:
        for _ in range(times):
            await self.begin(call, given)
            await self.heard("done")

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def die_inside(self, call: str, given: dict[str, Any], table: str, *, unheard: bool) -> None:
        """Killed while the call is about to write a table; `unheard`: its backend finishes all the same."""
        holder = await asyncpg.connect(self._dsn)
        try:
            await holder.execute(f"begin; lock table flowfabric.{table} in access exclusive mode")
            await self.begin(call, given)
            backend = await until_blocked(self._sql, table)
            await self.kill()
            if not unheard:
                assert await self._sql.fetchval("select pg_terminate_backend($1, 60000)", backend)
        finally:
            await holder.close()
        async with asyncio.timeout(PATIENCE):
            while await self._sql.fetchval("select exists (select from pg_stat_activity where pid = $1)", backend):
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def a_victim(dsn: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[Victim]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, dsn, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    victim = Victim(process, sql, dsn)
    try:
        await victim.heard("ready")
        yield victim
    finally:
        await victim.kill()


async def converged(engine: ff.Engine, sql: asyncpg.Connection[Any], clock: Clock) -> None:
    """After the restart all duties go idle; nothing is left, nothing was done twice."""
    await settle_flows(engine, clock)
    await check_settled(engine, sql)
    assert await engine.audit(events=True) == []


async def states(flow: Flow) -> Counter[str]:
    return Counter((await flow.states()).values())


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        ("complete", "lost"),
        ("complete", "unheard"),
        ("first chunk", "lost"),
        ("between chunks", ""),
        ("last chunk", "unheard"),
    ],
)
async def test_a_fan_out_of_1200_is_finished_by_the_next_process(
    moment: str, how: str, plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    downs = [f"d{n}" for n in range(1200)]
    flow = await submitted(plain_engine, {"u": (), **dict.fromkeys(downs, ("u",))})
    end, chunk = ("complete", {"kind": flow.kind("u")}), ("dispatch_cascades", {"edges": 200})
    unheard = how == "unheard"
    async with a_victim(database, sql) as victim:
        match moment:
            case "complete":
                await victim.die_inside(*end, "pending_cascade", unheard=unheard)
            case "first chunk":
                await victim.do(*end)
                await victim.die_inside(*chunk, "ready", unheard=unheard)
            case "between chunks":
                await victim.do(*end)
                await victim.do(*chunk, times=2)
                await victim.kill()
            case "last chunk":
                await victim.do(*end)
                await victim.do(*chunk, times=3)
                await victim.die_inside(*chunk, "ready", unheard=unheard)
    left = await sql.fetchval("select count(*) from flowfabric.execution where state = 'waiting_children'")
    pending = await sql.fetchval("select count(*) from flowfabric.pending_cascade")
    ended = not (moment == "complete" and not unheard)
    assert pending == (1 if ended and left else 0), "an event is fully dispatched or still pending"
    assert (
        left
        == {"complete": 700 if unheard else 1200, "first chunk": 700, "between chunks": 300, "last chunk": 0}[moment]
    )
    if not ended:
        await clock.advance(minutes=10)
        await plain_engine.run_timers("lease")
        await flow.complete("u")
    await converged(plain_engine, sql, clock)
    assert await states(flow) == {"completed": 1, "waiting": 1200}
    assert await flow.outcomes("u") == ["success"]
    groups = (await flow.describe()).edge_groups
    assert {(g.satisfied_count, g.total_deps) for g in groups} == {(1, 1)}
    assert len(await hold(plain_engine, 1200)) == 1200


@pytest.mark.parametrize(("hop", "how"), [(0, "lost"), (0, "unheard"), (1, "lost"), (20, "unheard")])
async def test_a_chain_of_skips_continues(
    hop: int, how: str, plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    names = [f"n{n}" for n in range(40)]
    flow = await submitted(
        plain_engine, {name: (names[place - 1],) if place else () for place, name in enumerate(names)}
    )
    async with a_victim(database, sql) as victim:
        fail = ("fail", {"kind": flow.kind("n0")})
        if hop == 0:
            await victim.die_inside(*fail, "unsuccessful", unheard=how == "unheard")
        else:
            await victim.do(*fail)
            await victim.do("dispatch_cascades", {}, times=hop - 1)
            await victim.die_inside("dispatch_cascades", {}, "unsuccessful", unheard=how == "unheard")
    if hop == 0 and how == "lost":
        await clock.advance(minutes=10)
        await plain_engine.run_timers("lease")
        await flow.fail("n0")
    await converged(plain_engine, sql, clock)
    assert await states(flow) == {"failed": 1, "skipped": 39}
    for name in names[1:]:
        assert await flow.outcomes(name) == ["skipped"]


@pytest.mark.parametrize(
    ("moment", "won"), [("before", True), ("inside", True), ("inside", False), ("unheard", True), ("between", False)]
)
async def test_the_losers_of_a_race_are_cancelled_once(
    won: bool, moment: str, plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    flow = await submitted(plain_engine, fan_in(60), {"join": AnyOf() if won else Quorum(60)})
    running = [await flow.claim(f"u{n}") for n in (2, 3, 4)]
    chunk = ("cancel_siblings", {"limit": 10})
    async with a_victim(database, sql) as victim:
        await victim.do("complete" if won else "fail", {"kind": flow.kind("u1")})
        match moment:
            case "inside" | "unheard":
                await victim.do(*chunk)
                await victim.die_inside(*chunk, "unsuccessful", unheard=moment == "unheard")
            case "between":
                await victim.do(*chunk, times=3)
                await victim.kill()
    (entry,) = await plain_engine.list_sibling_cancels()
    assert len(entry.siblings) == {"before": 59, "inside": 49, "unheard": 39, "between": 29}[moment]
    assert await plain_engine.reconcile_sibling_cancel_group(flow.id, flow["join"]) == "no_op"
    await converged(plain_engine, sql, clock)
    assert await states(flow) == {
        "cancelled": 59,
        "completed" if won else "failed": 1,
        "waiting" if won else "skipped": 1,
    }
    reason = "sibling_quorum_satisfied" if won else "sibling_quorum_impossible"
    for n in range(2, 61):
        assert await flow.outcomes(f"u{n}") == ["cancelled"]
        assert (await flow.record(f"u{n}")).cancellation_reason == reason
    assert await flow.counts("join") == ((1, 59, 0, 60) if won else (0, 60, 0, 60))
    for claimed in running:
        with pytest.raises(FlowFabricError):
            await plain_engine.complete(claimed.handle)


async def test_two_dispatchers_one_of_which_dies(
    plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    flows = [await submitted(plain_engine, fan_in(9), {"join": AnyOf()}) for _ in range(8)]
    for flow in flows:
        await flow.complete("u1")
    assert len(await plain_engine.list_sibling_cancels()) == 8
    async with a_victim(database, sql) as victim:

        async def other() -> None:
            while (await plain_engine.cancel_siblings(limit=1)).action != "none":
                pass

        going = asyncio.create_task(other())
        await victim.do("cancel_siblings", {"limit": 1}, times=20)
        await victim.begin("cancel_siblings", {"limit": 1})
        await victim.kill()
        await going
    await converged(plain_engine, sql, clock)
    for flow in flows:
        assert await states(flow) == {"completed": 1, "cancelled": 8, "waiting": 1}
        for n in range(2, 10):
            assert await flow.outcomes(f"u{n}") == ["cancelled"]


@pytest.mark.parametrize(
    "moment", ["after the header", "inside the header", "inside a chunk", "unheard", "between chunks"]
)
async def test_a_cancelled_flow_is_cancelled_to_the_end(
    moment: str, plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    members = 600
    names = [f"n{n}" for n in range(members)]
    flow = await submitted(plain_engine, {name: ("n0",) if place >= 300 else () for place, name in enumerate(names)})
    running = [await flow.claim(f"n{n}") for n in (297, 298, 299)]
    header = ("cancel_flow_header", {"flow_id": str(flow.id), "reason": "enough of it"})
    chunk = ("reconcile_cancellations", {"members": 100, "chunks": 1})
    async with a_victim(database, sql) as victim:
        match moment:
            case "inside the header":
                await victim.die_inside(*header, "cancel_member", unheard=False)
            case "after the header":
                await victim.do(*header)
            case "inside a chunk" | "unheard":
                await victim.do(*header)
                await clock.advance(seconds=31)
                await victim.do(*chunk)
                await victim.die_inside(*chunk, "unsuccessful", unheard=moment == "unheard")
            case "between chunks":
                await victim.do(*header)
                await clock.advance(seconds=31)
                await victim.do(*chunk, times=2)
    owed = await sql.fetchval("select count(*) from flowfabric.cancel_member")
    done = {"inside the header": members, "inside a chunk": 100, "unheard": 200, "between chunks": 200}.get(moment, 0)
    assert owed == members - done
    if moment == "inside the header":
        assert (await flow.describe()).public_flow_state == "open", "all of it or nothing"
        assert isinstance(await plain_engine.cancel_flow_header(flow.id, reason="enough of it"), FlowCancelHeader)
    assert await plain_engine.claim_many(**WORKER, limit=10) == [], "nothing is claimed after the header"
    await plain_engine.complete(running[0].handle)  # unless its own worker is first
    await clock.advance(seconds=31)
    await converged(plain_engine, sql, clock)
    ended = await sql.fetch("select state, cancellation_reason, count(*) from flowfabric.execution group by 1, 2")
    assert sorted(map(tuple, ended)) == [("cancelled", "enough of it", members - 1), ("completed", None, 1)]
    ends = await sql.fetchval("select count(*) from flowfabric.event where outcome is not null")
    assert ends == members


@pytest.mark.parametrize("seed", sampling.seeds(1, 2))
async def test_backends_that_die_at_any_moment(
    seed: int, plain_engine: ff.Engine, database: str, sql: asyncpg.Connection[Any], clock: Clock
) -> None:
    """Three loops of duties lose their connections again and again while flows of every shape end."""
    chance = random.Random(seed)
    across, hops, race = (100, 30, 40) if sampling.is_full() else (20, 10, 10)
    wide = {"u": (), **{f"d{n}": ("u",) for n in range(across)}, "j": [f"d{n}" for n in range(across)]}
    deep = {f"n{n}": (f"n{n - 1}",) if n else () for n in range(hops)}
    flows = [
        await submitted(plain_engine, wide),
        await submitted(plain_engine, deep),
        await submitted(plain_engine, fan_in(race), {"join": AnyOf()}),
        await submitted(plain_engine, fan_in(race), {"join": Quorum(race - 1)}),
        await submitted(plain_engine, wide),
    ]
    await flows[0].fail("u")
    await flows[1].fail("n0")
    await flows[2].complete("u1")
    await flows[3].fail("u1", "u2")
    await plain_engine.cancel_flow_header(flows[4].id, reason="over", grace=timedelta(0))
    busy = 3
    kills = 0

    async def serve(engine: ff.Engine, calls: random.Random) -> None:
        nonlocal busy
        idle = 0
        while idle < 3 or kills < 5:
            try:
                swept = await engine.dispatch_cascades(limit=calls.choice([1, 3]), edges=calls.choice([1, 7, 40]))
                siblings = await engine.cancel_siblings(limit=calls.choice([1, 5]))
                cancelled = await engine.reconcile_cancellations(members=calls.choice([3, 20]))
            except FlowFabricError as error:
                assert error.retryable, error
                continue
            idle = 0 if swept.seen + cancelled.handled or siblings.action != "none" else idle + 1
        busy -= 1

    async def kill() -> None:
        nonlocal kills
        while busy:
            await asyncio.sleep(chance.random() * 0.02)
            kills += await sql.fetchval(
                "select count(*) filter (where pg_terminate_backend(pid)) from (select pid from pg_stat_activity"
                " where application_name = 'flowfabric' and state = 'active' and datname = current_database()"
                " order by random() limit 1) v"
            )

    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(await ff.Engine.connect(database, max_size=1)) for _ in range(busy)]
        servers = [serve(engine, random.Random(10 * seed + number)) for number, engine in enumerate(engines)]
        await asyncio.gather(*servers, kill())
    assert kills >= 1  # how many depends on how long the work takes
    await converged(plain_engine, sql, clock)
    assert await states(flows[0]) == {"failed": 1, "skipped": across + 1}
    assert await states(flows[1]) == {"failed": 1, "skipped": hops - 1}
    assert await states(flows[2]) == {"completed": 1, "cancelled": race - 1, "waiting": 1}
    assert await states(flows[3]) == {"failed": 2, "cancelled": race - 2, "skipped": 1}
    assert await states(flows[4]) == {"cancelled": across + 2}
