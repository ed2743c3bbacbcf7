"""Two concurrent callers: engines on one connection each, and helpers that hold one of them in a transaction.

A `Party` is an engine on a connection of its own; between `begin` and `commit` or `rollback` its calls are not
committed. `waiting` starts a call of another party and returns once the server reports that it waits for the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Self

import asyncpg

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from tests.support import Clock, Wipe

PATIENCE = 60.0
"""Seconds after which a call that should have ended counts as stuck. Nothing waits this long when all is well."""
FEW = 4
"""As many parties stay from one case to the next; what more a case needs is opened for it."""


class OneConnection:
    """Replaces the pool: every statement goes to one connection, once, and the driver's errors are not hidden."""

    target = "one connection"

    def __init__(self, connection: asyncpg.Connection[Any], flow_partitions: int) -> None:
        self._connection = connection
        self.flow_partitions = flow_partitions

    async def fetch(self, sql: str, args: Sequence[Any], *, repeatable: bool = False) -> list[asyncpg.Record]:
        return list(await self._connection.fetch(sql, *args))

    async def close(self) -> None:
        await self._connection.close()


class Party(ff.Engine):
    """An engine on one connection, in a transaction that the test opens and ends."""

    connection: asyncpg.Connection[Any]
    pid: int

    @classmethod
    async def join(cls, dsn: str) -> Self:
        connection = await asyncpg.connect(dsn)
        partitions = await connection.fetchval("select flow_partitions from flowfabric.deployment_info()")
        party = cls(OneConnection(connection, partitions), None)  # type: ignore[arg-type]
        party.connection = connection
        party.pid = connection.get_server_pid()
        return party

    async def begin(self, isolation: str = "read committed") -> None:
        await self.connection.execute(f"begin isolation level {isolation}")

    async def commit(self) -> None:
        await self.connection.execute("commit")

    async def rollback(self) -> None:
        await self.connection.execute("rollback")

    async def end(self, ending: str) -> None:
        await self.connection.execute(ending)

    async def raise_floor(self, route: int) -> None:
        await self.connection.execute(
            "select flowfabric.raise_floors(r.lane, array[r.id]) from flowfabric.route r where r.id = $1", route
        )


async def settled(call: Awaitable[Any]) -> Any:
    """What a call answers, a refusal as the exception it is. Driver errors, deadlocks among them, are raised."""
    try:
        return await asyncio.wait_for(call, PATIENCE)
    except FlowFabricError as refusal:
        return refusal


async def waiting(
    watch: asyncpg.Connection[Any], waiter: Party, call: Awaitable[Any], *, behind: Party | None = None
) -> asyncio.Task[Any]:
    """Start a call and return once it waits for a lock, one that `behind` has; fails if it ends without waiting."""
    task = asyncio.ensure_future(settled(call))
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                blockers = await watch.fetchval("select pg_blocking_pids($1)", waiter.pid)
                if behind.pid in blockers if behind is not None else blockers:
                    return task
                assert not task.done(), f"did not wait: {task.result()!r}"
                await asyncio.sleep(0.0005)
    except BaseException:
        task.cancel()
        raise


class Stage:
    """One database for many cases: it is emptied before each, and audited as a whole after it."""

    def __init__(self, dsn: str, watch: asyncpg.Connection[Any]) -> None:
        self.dsn = dsn
        self.watch = watch
        self.clock = Clock(watch)
        self._company: list[Party] = []
        self._wipe: Wipe | None = None

    async def company(self, count: int) -> list[Party]:
        """So many parties, free of whatever a failed case left open."""
        for party in self._company[max(count, FEW) :]:
            party.connection.terminate()
        del self._company[max(count, FEW) :]
        await self._free()
        while len(self._company) < count:
            self._company.append(await Party.join(self.dsn))
        for party in self._company:
            # Claims raise the floor by chance; after this not before the test is over.
            await party.connection.execute("select setseed(0.5)")
        return self._company[:count]

    async def close(self) -> None:
        for party in self._company:
            party.connection.terminate()
        await self.watch.close()

    async def _free(self) -> None:
        for place, party in enumerate(self._company):
            try:
                await party.rollback()
            except (asyncpg.InterfaceError, asyncpg.PostgresError, OSError):
                await self.watch.execute("select pg_terminate_backend($1)", party.pid)
                self._company[place] = await Party.join(self.dsn)

    async def empty(self) -> None:
        """Delete all rows, once nothing that a failed case left open holds them."""
        if self.watch.is_in_transaction():
            await self.watch.execute("rollback")
        await self._free()
        if self._wipe is None:
            self._wipe = await Wipe.of(self.watch)
        await self._wipe()

    async def audit(self) -> None:
        violations = await self.watch.fetch("select rule, id, detail from flowfabric.audit(null, true)")
        assert not violations, violations
