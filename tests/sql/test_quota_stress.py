"""Many connections under few policies, with crashes and grants that expire: no snapshot shows more than a cap allows.

All work ends without the pass over all limits (`unblock`): the calls that make room, and what they leave for the duty
of limits that are due, promote everything.
"""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import NewExecution
from flowfabric.values.grant import Granted, ReclaimGranted
from flowfabric.values.ids import mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy
from tests import sampling
from tests.databases import fresh_database

WORKERS = 6
PATIENCE = 120.0
# Running executions, and admissions within the window, by policy and key, in one snapshot.
_RUNNING = """
select p.name, k.key, p.max_concurrent as cap, count(*) as running
from flowfabric.execution e
join flowfabric.limit_set l on l.digest = e.limits
cross join lateral unnest(l.quota_ids, l.quota_keys) as k (id, key)
join flowfabric.quota_policy p on p.id = k.id
where e.state = 'active' and p.max_concurrent > 0 group by 1, 2, 3
union all
select p.name, e.key, p.max_requests, count(*)
from (select flowfabric.now() as now) c, flowfabric.quota_policy p join flowfabric.quota_entry e on e.policy_id = p.id
where p.max_requests > 0 and e.admitted_at > c.now - flowfabric.window_of(p.window_seconds) group by 1, 2, 3
"""


class Crowd:
    """Workers that finish, fail, park, give back or forget what they claimed, and an operator who cancels."""

    def __init__(self, dsn: str, seed: int, jobs: int) -> None:
        self._dsn = dsn
        self._random = random.Random(seed)
        self._jobs = jobs
        self._left = jobs
        self.most: dict[tuple[str, str], tuple[int, int]] = {}

    async def run(self) -> None:
        async with await ff.Engine.connect(self._dsn) as engine:
            await self._fill(engine)
            self._watching = asyncio.create_task(self._watch())
            try:
                async with asyncio.timeout(PATIENCE):
                    await asyncio.gather(self._duties(engine), *(self._work(number) for number in range(WORKERS)))
            finally:
                self._left = 0
                await self._watching
            assert await engine.audit(events=True) == []

    async def _fill(self, engine: ff.Engine) -> None:
        make = engine.create_quota_policy
        narrow = (await make(name="narrow", max_concurrent=2)).quota_policy_id
        keyed = (await make(name="keyed", key="t", max_concurrent=3)).quota_policy_id
        rate = (await make(name="rate", window=timedelta(seconds=1), max_requests_per_window=40)).quota_policy_id
        sets = [(narrow,), (keyed,), (keyed, narrow), (rate,), (rate, keyed), ()]
        retry = ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(timedelta(milliseconds=1)))
        items = [
            NewExecution(
                execution_kind="k",
                lane_id=self._random.choice(["a", "b"]),
                tags={"t": str(n % 3)},
                priority=self._random.randrange(3),
                policy=ExecutionPolicy(quota_policy_ids=self._random.choice(sets), retry_policy=retry),
            )
            for n in range(self._jobs)
        ]
        self._ids = [made.execution_id for made in await engine.create_many(items)]

    async def _watch(self) -> None:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self._dsn)
        while self._left > 0:
            for name, key, cap, running in await connection.fetch(_RUNNING):
                self.most[name, key] = (max(running, self.most.get((name, key), (0, 0))[0]), cap)
        await connection.close()

    async def _duties(self, engine: ff.Engine) -> None:
        """What the led duties do, without their pauses."""
        while self._left > 0:
            for kind in ("lease", "delay"):
                await engine.run_timers(kind)
            await engine.unblock_limited()
            if self._random.random() < 0.1:
                await engine.reconcile_quotas()
                await engine.sweep()
            if self._random.random() < 0.2:
                await self._try(engine.cancel(Operator(self._random.choice(self._ids)), "enough"))
            counts = await engine._fetch("select count(*) as n from flowfabric.execution where completed_at is null")
            self._left = counts[0]["n"]

    async def _work(self, number: int) -> None:
        identity = {"worker_id": "pool", "worker_instance_id": f"pool-{number}"}
        async with await ff.Engine.connect(self._dsn) as engine:
            while self._left > 0:
                limit = self._random.choice([1, 2, 10])
                ttl = timedelta(milliseconds=self._random.choice([20, 2000]))
                lane = self._random.choice(["a", "b"])
                match self._random.randrange(3):
                    case 0:
                        claimed = await engine.claim_lanes({"a": 2, "b": 2}, limit=limit, lease_ttl=ttl, **identity)
                    case 1:
                        claimed = await engine.claim_many(lane, limit=limit, lease_ttl=ttl, **identity)
                    case _:
                        claimed = []
                        soon = timedelta(milliseconds=50)
                        for one in await engine.claim_for_worker(lane, max_grants=limit, grant_ttl=soon, **identity):
                            if self._random.random() < 0.7:  # others expire
                                await self._try(self._consume(engine, one, claimed, lease_ttl=ttl, **identity))
                for each in claimed:
                    await self._try(self._end(engine, each))

    async def _consume(
        self, engine: ff.Engine, granted: Granted | ReclaimGranted, claimed: list[Claimed], **given: Any
    ) -> None:
        target = granted.grant.execution_id
        if isinstance(granted, Granted):
            claimed.append(await engine.claim_execution(target, lease_id=mint_uuid(), attempt_id=mint_uuid(), **given))
        elif isinstance(
            taken := await engine.reclaim_execution(target, lease_id=mint_uuid(), attempt_id=mint_uuid(), **given),
            Claimed,
        ):
            claimed.append(taken)

    async def _end(self, engine: ff.Engine, one: Claimed) -> None:
        match self._random.randrange(12):
            case 0:
                await engine.fail(one.handle, "boom")
            case 1:
                await engine.release(one.handle)
            case 2:
                await engine.delay(one.handle, timedelta(milliseconds=5))
            case 3:
                pass  # the worker dies: its lease expires
            case _:
                await engine.complete(one.handle)

    async def _try(self, call: Any) -> None:
        try:
            await call
        except FlowFabricError as refusal:  # another was faster
            assert refusal.kind != "transport", refusal


@pytest.mark.parametrize("seed", sampling.seeds(1, 2, 3))
async def test_no_cap_and_no_rate_is_ever_passed(server: str, seed: int) -> None:
    async with fresh_database(server) as dsn:
        crowd = Crowd(dsn, seed, 300)
        await crowd.run()
        assert {name for name, _ in crowd.most} == {"narrow", "keyed", "rate"}
        assert all(running <= cap for running, cap in crowd.most.values()), crowd.most
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("select count(*) from flowfabric.quota_slot where until is null") == 0
        assert await connection.fetchval("select count(*) from flowfabric.blocked") == 0
        await connection.close()
