"""Random histories of processes that lead the duties: they start, stop, stall, lose the database and die in any call.

Time is the test's own: the server's clock does not move by itself, and processes that pause wait for the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric._duties import ALL, Cascade, TimerRunner, lead
from flowfabric._duties.lead import CASCADES, DUTIES, Leadership
from flowfabric._duties.timer import WokenDuty
from flowfabric.errors import FlowFabricError, TransportError
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy, TimeoutPolicy
from tests import sampling
from tests.databases import fresh_database
from tests.support import WORKER

LATE = 5.0  # seconds after which a group without a leader has one
ROUND = 0.75  # seconds between the rounds of a leader
START = datetime(2030, 1, 1, tzinfo=UTC)
STEPS = 60
RICH = 3  # the seed of a history in which everything happens
EVERYTHING = {
    "died leading ['duties']", "died leading ['cascades']", "died leading []", "duties without a leader",
    "cascades without a leader", "stopped", "cascade was due", "delay was due", "deadline was due", "lease was due",
    "attempt was due",
}  # fmt: skip
WOKEN = [duty for duty in ALL if issubclass(duty, WokenDuty)]
# Each end beyond the first is left to the duties.
CHAIN = [NewNode(name=f"n{n}", execution=NewExecution(execution_kind="member"),
                 after=[NewEdge(upstream=f"n{n - 1}")] if n else []) for n in range(5)]  # fmt: skip
DUE = """
select distinct kind from flowfabric.timer where due_at <= flowfabric.now()
union all select 'cascade' where exists (select from flowfabric.pending_cascade)
"""


class Died(BaseException):
    """The process does not exist any more."""


class Mortal(ff.Engine):
    """The engine of a process that can lose the database, or die in a call: before it, or when it is committed."""

    is_cut = False
    has_failed = False
    calls_left: int | None = None
    dies_after_commit = False

    async def _fetch(self, sql: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        if self.is_cut:
            self.has_failed = True
            raise TransportError(detail="cut")
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                if self.dies_after_commit:
                    await super()._fetch(sql, *args, repeatable=repeatable)
                raise Died
        return await super()._fetch(sql, *args, repeatable=repeatable)

    async def _row(self, sql: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._fetch(sql, *args, repeatable=repeatable))[0]


class Process:
    """One process: its loop of looks, which is the real one, and its rounds of the duties."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engine = Mortal(world.engine._database, None)
        self.leadership = Leadership(self.engine)
        self.runners = {
            DUTIES: TimerRunner(self.engine, [duty(self.engine) for duty in WOKEN]),
            CASCADES: TimerRunner(self.engine, [Cascade(self.engine)]),
        }
        self.stopping = asyncio.Event()
        self.looks_at = self.round_at = world.now
        self.able_at = 0.0  # when its stall, or the cut of its network, ends
        self.sound_since: float | None = None  # its looks succeed since then
        self.has_looked = False  # since its stall, or since the clock of the server was set
        self._paused = asyncio.Event()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self.leadership.run(self.stopping), name=f"process {id(self)}")
        world.by_task[self._task] = self

    async def pause(self, seconds: float) -> None:
        """Sleep in the time of the world."""
        self.looks_at = self.world.now + seconds
        self._paused.set()
        await self._wake.wait()
        self._wake.clear()

    async def first_look(self) -> None:
        await self._looked()

    async def look(self) -> None:
        self._paused.clear()
        self._wake.set()
        await self._looked()

    async def _looked(self) -> None:
        self.engine.has_failed = False
        paused = asyncio.create_task(self._paused.wait())
        await asyncio.wait([paused, self._task], return_when=asyncio.FIRST_COMPLETED)
        paused.cancel()
        if self._task.done() and isinstance(self._task.exception(), Died):
            raise Died
        if self.engine.has_failed:
            self.sound_since = None
            assert not (self.leads(DUTIES) or self.leads(CASCADES)), "a process that cannot look leads nothing"
        else:
            self.has_looked = True
            self.sound_since = self.world.now if self.sound_since is None else self.sound_since

    async def round(self) -> None:
        """Run the duties that it leads once."""
        self.round_at = self.world.now + ROUND
        for group, runner in self.runners.items():
            if self.leads(group) and not self.engine.is_cut:
                await runner.run_once()

    def leads(self, group: str) -> bool:
        return self.leadership.leads[group].is_set()

    @property
    def is_able(self) -> bool:
        return self.able_at <= self.world.now

    async def stop(self) -> None:
        """End as `Duties.stop` does."""
        await self.end()
        if self.leads(DUTIES) or self.leads(CASCADES):
            with contextlib.suppress(FlowFabricError, Died):
                await self.engine.leave_lead()

    async def end(self) -> None:
        del self.world.by_task[self._task]
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class World:
    """The processes, the time, and what must hold at any time."""

    def __init__(self, engine: ff.Engine, sql: asyncpg.Connection[Any], rng: random.Random) -> None:
        self.engine = engine
        self.sql = sql
        self.rng = rng
        self.now = 0.0
        self.ahead = 0.0  # of the server's clock
        self.by_task: dict[asyncio.Task[None], Process] = {}
        self.processes: list[Process] = []
        self.led_at = dict.fromkeys((DUTIES, CASCADES), 0.0)
        self.leader: Process | None = None
        self.leader_since = 0.0
        self.due_since: dict[str, float] = {}
        self.seen: set[str] = set()

    async def first_of(self, seconds: float, *events: asyncio.Event | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        await self.by_task[task].pause(seconds)

    async def set_clock(self) -> None:
        at = START + timedelta(seconds=self.now + self.ahead)
        await self.sql.execute("update public.model_time set at = $1", at)

    # What happens

    async def start(self) -> None:
        if len(self.processes) < 4:
            self.processes.append(made := Process(self))
            await self._alive(made, made.first_look())

    async def stop(self) -> None:
        if one := self._any():
            self.processes.remove(one)
            await one.stop()
            self.seen.add("stopped")

    async def die(self) -> None:
        """One dies in one of its next calls."""
        if one := self._any():
            one.engine.calls_left = self.rng.randrange(10)
            one.engine.dies_after_commit = self.rng.random() < 0.5

    async def stall(self) -> None:
        if one := self._any():
            one.able_at = self.now + self.rng.uniform(0.5, 12)
            one.sound_since, one.has_looked = None, False

    async def cut(self) -> None:
        if one := self._any():
            one.engine.is_cut = True
            one.able_at = self.now + self.rng.uniform(0.5, 12)
            one.sound_since, one.has_looked = None, False

    async def set_back_or_forward(self) -> None:
        self.ahead += self.rng.choice([10.0, 3600.0, -3600.0, -86400.0])
        await self.set_clock()
        for one in self.processes:
            one.has_looked = False

    async def submit(self) -> None:
        """Something becomes due, for one of the duties."""
        span = timedelta(seconds=self.rng.uniform(1, 10))
        match self.rng.choice(["delay", "deadline", "lease", "attempt", "cascade"]):
            case "delay":
                await self.engine.create_execution(execution_kind="test", delay_until=span)
            case "deadline":
                await self.engine.create_execution(execution_kind="test", execution_deadline_at=span)
            case "cascade":
                made = await self.engine.submit_flow(CHAIN)
                await self.engine.cancel(Operator(made.nodes["n0"]), "enough")
            case kind:
                has_time = kind == "attempt"
                timeout = TimeoutPolicy(attempt_timeout=span if has_time else None)
                await self.engine.create_execution(execution_kind=kind, policy=ExecutionPolicy(timeout_policy=timeout))
                ttl = timedelta(hours=1) if has_time else span
                await self.engine.claim_many(limit=10, kinds=[kind], lease_ttl=ttl, **WORKER)

    async def wait(self) -> None:
        """Let time pass, and every process act when its time is come."""
        end = self.now + self.rng.choice([0.3, 1.0, 4.0, 8.0])
        while True:
            await self.check()
            at, _, one, kind = min(
                ((max(at, one.able_at if not one.engine.is_cut else 0.0), number, one, kind)
                 for number, one in enumerate(self.processes)
                 for at, kind in ((one.looks_at, "look"), (one.round_at, "round"), (one.able_at, "able"))
                 if kind != "able" or one.able_at > self.now or one.engine.is_cut),
                default=(end, 0, None, ""), key=lambda item: item[:2],
            )  # fmt: skip
            self.now = max(self.now, min(at, end))
            await self.set_clock()
            await self.check()
            if one is None or at > end:
                return
            if kind == "able":
                one.engine.is_cut = False
            else:
                await self._alive(one, one.look() if kind == "look" else one.round())

    async def _alive(self, one: Process, act: Any) -> None:
        try:
            await act
        except Died:
            self.seen.add(f"died leading {sorted(name for name in self.led_at if one.leads(name))}")
            self.processes.remove(one)
            await one.end()
            # It may have taken a lead in the call in which it died.
            for row in await self.sql.fetch(
                "select name from flowfabric.lead where instance = $1", one.engine._instance
            ):
                self.led_at[row["name"]] = self.now

    def _any(self) -> Process | None:
        return self.rng.choice(self.processes) if self.processes else None

    # What must hold

    async def check(self) -> None:
        for group, needed in ((DUTIES, 1), (CASCADES, 2)):
            sound = sorted(one.sound_since for one in self.processes if one.sound_since is not None)
            leaders = [one for one in self.processes if one.leads(group) and one.is_able]
            assert len([one for one in leaders if one.has_looked]) <= 1, f"two processes lead the {group}"
            if leaders:
                self.led_at[group] = self.now
            elif len(sound) >= needed:
                late = self.now - max(self.led_at[group], sound[needed - 1])
                assert late <= LATE, f"the {group} have no leader for {late:.1f} s"
                self.seen.add(f"{group} without a leader")
            if group == DUTIES and (leaders[:1] or [None])[0] is not self.leader:
                self.leader, self.leader_since = (leaders[:1] or [None])[0], self.now
        due = [row["kind"] for row in await self.sql.fetch(DUE)]
        self.due_since = {kind: self.due_since.get(kind, self.now) for kind in due}
        for kind, since in self.due_since.items():
            if self.leader is not None:
                late = self.now - max(since, self.leader_since)
                assert late <= 2 * ROUND + 0.1, f"{kind} is not done for {late:.1f} s though a process leads"
                self.seen.add(f"{kind} was due")

    async def end(self) -> None:
        for one in self.processes:
            await one.end()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def timeless(server: str) -> AsyncIterator[tuple[ff.Engine, asyncpg.Connection[Any]]]:
    """A database whose clock moves only when the test says so."""
    async with fresh_database(server) as dsn, await ff.Engine.connect(dsn, notifications=False) as engine:
        sql = await asyncpg.connect(dsn)
        await sql.execute(
            "create table public.model_time as select clock_timestamp() as at;"
            "create or replace function flowfabric.now() returns timestamptz language sql volatile"
            " as 'select at from public.model_time'"
        )
        source = await sql.fetchval("select pg_get_functiondef('flowfabric.take_lead'::regproc)")
        assert "clock_timestamp()" in source
        await sql.execute(source.replace("clock_timestamp()", "flowfabric.now()"))
        yield engine, sql
        await sql.close()


async def play(
    timeless: tuple[ff.Engine, asyncpg.Connection[Any]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> set[str]:
    engine, sql = timeless
    rng = random.Random(seed)
    world = World(engine, sql, rng)
    monkeypatch.setattr(lead, "first_of", world.first_of)
    monkeypatch.setattr(lead, "random", rng)
    await sql.execute("truncate flowfabric.lead, flowfabric.timer, flowfabric.pending_cascade")
    await world.set_clock()
    acts = [
        *[world.wait] * 6, *[world.start] * 3, *[world.submit] * 2, *[world.die] * 2,
        world.stop, world.stall, world.cut, world.set_back_or_forward,
    ]  # fmt: skip
    try:
        await world.start()
        for _ in range(STEPS):
            await rng.choice(acts)()
            await world.check()
    finally:
        await world.end()
    return world.seen


@pytest.mark.parametrize("seed", sampling.seeds(RICH, *range(RICH), *range(RICH + 1, 100)))
async def test_one_process_leads_and_another_takes_over_in_any_history(
    timeless: tuple[ff.Engine, asyncpg.Connection[Any]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    seen = await play(timeless, monkeypatch, seed)
    assert seed != RICH or seen >= EVERYTHING, seen
