"""Shared helpers: an engine that audits itself, a movable clock, short ways into every state."""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

import flowfabric as ff
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import on
from flowfabric.values.execution import Created
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.lease import Handle
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh
from tests.ids import home, id_in

WORKER = {"worker_id": "pool", "worker_instance_id": "pool-1"}
OTHER = {"worker_id": "pool", "worker_instance_id": "pool-2"}
MINUTE = timedelta(minutes=1)


def in_database(dsn: str, name: str) -> str:
    """The same server, another database."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


@functools.cache
def system_programs() -> Path | None:
    """The programs of a PostgreSQL that came with the system, 15 or newer; None where there is none."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if found := shutil.which("pg_config"):
        answer = subprocess.run([found, "--bindir"], capture_output=True, text=True, check=False)
        places.append(Path(answer.stdout.strip()))
    for place in places:
        if not (place / "postgres").exists() or not (place / "initdb").exists():
            continue
        words = subprocess.run([place / "postgres", "--version"], capture_output=True, text=True, check=False).stdout
        major = words.split()[2].split(".")[0] if len(words.split()) > 2 else "0"
        if major.isdigit() and int(major) >= 15:
            return place
    return None


_READS = ("audit", "read_", "list_", "find", "describe_", "lane_stats", "count_", "deployment_info")


class CheckedEngine(ff.Engine):
    """An engine whose every call that may write is followed by an audit of the whole database."""

    async def _fetch(self, statement: str, *args: Any, repeatable: bool = False) -> list[asyncpg.Record]:
        try:
            return await super()._fetch(statement, *args, repeatable=repeatable)
        finally:
            if not statement.partition("flowfabric.")[2].startswith(_READS):
                await self.check()

    async def _row(self, statement: str, *args: Any, repeatable: bool = False) -> asyncpg.Record:
        return (await self._fetch(statement, *args, repeatable=repeatable))[0]

    async def check(self) -> None:
        violations = await self.audit(events=True)
        assert not violations, violations


class Clock:
    """The database's clock, which only its owner may move."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection

    async def advance(self, *, seconds: float = 0, **parts: float) -> None:
        await self._connection.execute(
            "update flowfabric.clock set shift = shift + $1", timedelta(seconds=seconds, **parts)
        )

    async def now(self) -> Any:
        return await self._connection.fetchval("select flowfabric.now()")


async def end_sleeps(dsn: str) -> None:
    """Let two hours pass, so that executions that sleep for an hour continue."""
    async with await ff.Engine.connect(dsn, notifications=False) as engine:
        await engine._fetch("update flowfabric.clock set shift = interval '2 hours'")
        await engine.run_timers("delay")


class Wipe:
    """Makes a database what a fresh copy of the template is, while connections to it stay open."""

    # Their rows come with the schema. What a test changes in one of them is put back.
    KEPT = frozenset(
        {"build", "schema_step", "clock", "deployment", "keystore", "log_epoch", "public_function", "service"}
    )
    # Rows are deleted, which is cheap; what deleting leaves behind is removed now and then.
    _TRUNCATE_EVERY = 400

    def __init__(self, connection: asyncpg.Connection[Any], tables: list[str], key: asyncpg.Record) -> None:
        self._connection = connection
        named = [f"flowfabric.{table}" for table in tables]
        self._deletes = "".join(f"delete from {name};" for name in named)
        self._truncate = f"truncate {', '.join(named)} restart identity; alter sequence flowfabric.event_number restart"
        self._key = tuple(key)
        self._times = 0

    @classmethod
    async def of(cls, connection: asyncpg.Connection[Any]) -> Wipe:
        found = await connection.fetch(
            "select c.relname from pg_class c where c.relnamespace = 'flowfabric'::regnamespace"
            " and c.relkind in ('r', 'p') and not c.relispartition order by c.relname <> 'route', c.relname"
        )
        key = await connection.fetchrow("select kid, inner_key, outer_key, installed_at from flowfabric.keystore")
        return cls(connection, [row["relname"] for row in found if row["relname"] not in cls.KEPT], key)

    async def __call__(self) -> None:
        if self._times == 0:  # a function: its statements are planned once
            await self._connection.execute(
                "create or replace function pg_temp.delete_all() returns void language plpgsql as"
                f" $$ begin {self._deletes} end; $$"
            )
        self._times += 1
        await self._connection.execute(
            ("select pg_temp.delete_all();" if self._times % self._TRUNCATE_EVERY else self._truncate + ";")
            + "update flowfabric.clock set shift = '0';"
            "delete from flowfabric.deployment; insert into flowfabric.deployment (flow_partitions, event_heartbeats)"
            " values (256, true);"
            "delete from flowfabric.log_epoch; insert into flowfabric.log_epoch (epoch) values (0);"
            "select flowfabric.begin_epoch();"
            "delete from flowfabric.keystore"
        )
        await self._connection.execute(
            "insert into flowfabric.keystore (kid, inner_key, outer_key, installed_at, state)"
            " values ($1, $2, $3, $4, 'current')",
            *self._key,
        )


async def until_blocked(sql: asyncpg.Connection[Any], table: str | None = None) -> int:
    """Wait until a backend of this database waits for a lock, of a table if one is named; returns its process id.

    The databases of other tests on the same server have the same table numbers, being copies of one template.
    """
    async with asyncio.timeout(60):
        while True:
            pid: int | None = await sql.fetchval(
                """select a.pid from pg_stat_activity a
                where a.datname = current_database() and a.wait_event_type = 'Lock'
                  and ($1::text is null or exists (select from pg_locks l where l.pid = a.pid and not l.granted
                                                   and l.relation = ('flowfabric.' || $1)::regclass))""",
                table,
            )
            if pid is not None:
                return pid
            await asyncio.sleep(0.002)


async def submit(engine: ff.Engine, **fields: Any) -> ff.ExecutionId:
    """Create one execution and give its id."""
    created = await engine.create_execution(**{"execution_kind": "test", **fields})
    assert isinstance(created, Created)
    return created.execution_id


async def submit_member(engine: ff.Engine, flow_id: FlowId, **fields: Any) -> ff.ExecutionId:
    """Create one execution and make it a member of a flow, which is made with its first member."""
    await engine.create_flow(flow_id)
    execution_id = await submit(engine, flow_id=flow_id, **fields)
    await engine.add_execution_to_flow(flow_id, execution_id)
    return execution_id


async def claim_one(engine: ff.Engine, **fields: Any) -> Claimed:
    """Claim one execution, which must be there."""
    claimed = await engine.claim(**{**WORKER, **fields})
    assert claimed is not None
    return claimed


async def started(engine: ff.Engine, *, lease_ttl: timedelta = timedelta(seconds=30), **fields: Any) -> Claimed:
    """Create an execution and claim it."""
    await submit(engine, **fields)
    return await claim_one(engine, lease_ttl=lease_ttl)


async def end_one(engine: ff.Engine, **fields: Any) -> ff.ExecutionId:
    """Run an execution to its end: two events."""
    held = await started(engine, **fields)
    await engine.complete(held.handle)
    return held.execution_id


RETRY = ExecutionPolicy(retry_policy=ff.RetryPolicy(max_retries=3, backoff=ff.Fixed(timedelta(seconds=10))))


class Reached:
    """An execution in a given state, with the lease its last worker had, if it ever had one."""

    def __init__(self, execution_id: ff.ExecutionId, claimed: Claimed | None) -> None:
        self.id = execution_id
        self.claimed = claimed

    @property
    def handle(self) -> Handle:
        assert self.claimed is not None
        return self.claimed.handle


async def _waiting_first(engine: ff.Engine, clock: Clock) -> Reached:
    return Reached(await submit(engine, policy=RETRY), None)


async def _waiting_retry(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _delayed_retry(engine, clock)
    await clock.advance(seconds=11)
    assert await engine.promote_delayed(at.id) == "promoted"
    return at


async def _waiting_replay(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _completed(engine, clock)
    await engine.replay_execution(at.id)
    return at


async def _waiting_interrupted(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.release(at.handle)
    return at


async def _delayed_first(engine: ff.Engine, clock: Clock) -> Reached:
    return Reached(await submit(engine, policy=RETRY, delay_until=timedelta(hours=1)), None)


async def _delayed_retry(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.fail(at.handle, "boom")
    return at


async def _delayed_interrupted(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.delay(at.handle, timedelta(hours=1))
    return at


async def _parked(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    elsewhere = id_in((home(at.id) + 1) % 256)
    await engine.create_execution(
        execution_kind="other",
        execution_id=elsewhere,
        delay_until=timedelta(days=1),
        idempotency_key=None,
        flow_id=None,
    )
    assert (await engine.park(at.handle, ends_of=[elsewhere])).parked
    return at


async def _parked_for_signals(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    opened = await engine.open_wait(at.handle, "w", 0, ["k", "l"], None)
    assert (await engine.park(at.handle, signals_on={one.waitpoint_id: 0 for one in opened.waitpoints})).parked
    return at


async def _suspended(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.suspend(at.handle, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    return at


async def _resumable(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _suspended(engine, clock)
    await engine.resume_execution(at.id, "operator")
    return at


async def _resume_delayed(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _suspended(engine, clock)
    await engine.resume_execution(at.id, "operator", timedelta(hours=1))
    return at


def _blocked(reason: str) -> Callable[[ff.Engine, Clock], Awaitable[Reached]]:
    async def reach(engine: ff.Engine, clock: Clock) -> Reached:
        at = await _waiting_first(engine, clock)
        assert (await engine.block_execution_for_admission(at.id, reason)).__class__.__name__ == "Blocked"
        return at

    return reach


async def _stopped(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.stop_changed(at.handle, detail="recorded: a; asked for: b", digest="new code")
    return at


async def _active(engine: ff.Engine, clock: Clock) -> Reached:
    claimed = await started(engine, policy=RETRY)
    return Reached(claimed.execution_id, claimed)


async def _expired_lease(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await clock.advance(seconds=31)
    await engine.mark_lease_expired_if_due(at.id)
    return at


async def _revoked_lease(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.revoke_lease(at.id)
    return at


async def _completed(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.complete(at.handle, b"done")
    return at


async def _failed(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.fail(at.handle, "boom", failure_class="permanent")
    return at


async def _cancelled(engine: ff.Engine, clock: Clock) -> Reached:
    at = await _active(engine, clock)
    await engine.cancel(at.handle, "no longer wanted")
    return at


async def _expired(engine: ff.Engine, clock: Clock) -> Reached:
    claimed = await started(engine, policy=RETRY, execution_deadline_at=timedelta(seconds=5))
    await clock.advance(seconds=6)
    assert await engine.expire_execution(claimed.execution_id, "execution_deadline") == "expired"
    return Reached(claimed.execution_id, claimed)


# Every position of the transition table that can be reached without flows, as `values.transitions.position` writes it.
#   letter  W waits for a worker, D is delayed, C waits for other executions, B is blocked, A is active under a lease,
#           X lost its lease by expiry, V lost it by revocation, S is suspended, T has ended with the outcome named
#   suffix  what the next claim starts: .1 the first attempt, .r a retry, .p a replay, .i the attempt that was
#           interrupted, .s the same after a suspension, .w the same of an execution that is parked
#   B.word  what it is blocked for; B.changed: stopped by changed code
STATES: dict[str, Callable[[ff.Engine, Clock], Awaitable[Reached]]] = {
    "W.1": _waiting_first,
    "W.r": _waiting_retry,
    "W.p": _waiting_replay,
    "W.i": _waiting_interrupted,
    "W.s": _resumable,
    "D.1": _delayed_first,
    "D.r": _delayed_retry,
    "D.i": _delayed_interrupted,
    "D.s": _resume_delayed,
    "C.w": _parked,
    "B.budget": _blocked("waiting_for_budget"),
    "B.quota": _blocked("waiting_for_quota"),
    "B.route": _blocked("waiting_for_capable_worker"),
    "B.operator": _blocked("paused_by_operator"),
    "B.lane": _blocked("paused_by_policy"),
    "B.changed": _stopped,
    "A": _active,
    "X": _expired_lease,
    "V": _revoked_lease,
    "S": _suspended,
    "S.w": _parked_for_signals,
    "T:completed": _completed,
    "T:failed": _failed,
    "T:cancelled": _cancelled,
    "T:expired": _expired,
}

new_id = mint_uuid
