"""Workers, senders, operators and duties on the same few executions, as fast as they can; at the end nothing is lost.

Every actor has its own connection on which the driver's errors are not hidden, so a deadlock fails the test. What
they do is drawn from a fixed seed; in which order the server takes it is not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import count_signals, from_sources, on
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.wait import Fresh, Suspended, UsePending, WaitpointToken
from tests import sampling
from tests.interleave import Party, Stage
from tests.support import submit

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE = timedelta(minutes=10)
BEHAVIORS = ("fail", "cancel", "expire", "auto_resume_with_timeout_signal", "escalate")
KINDS = ("lease", "attempt", "deadline", "delay", "parked", "suspension", "waitpoint")
RETRY = ExecutionPolicy(
    retry_policy=ff.RetryPolicy(max_retries=1000, backoff=ff.Fixed(timedelta(0))), max_signals_per_execution=0
)
# The errors that losers of a race get. Anything else is unexpected.
EXPECTED = {
    "already_suspended", "execution_not_active", "execution_not_suspended", "invalid_waitpoint_for_execution",
    "lease_revoked", "pending_waitpoint_expired", "stale_lease", "target_not_signalable",
    "waitpoint_closed", "waitpoint_not_pending",
}  # fmt: skip
STEPS = 120
# No execution here parks for a signal while it has read one: a parked execution has received none, at any moment.
MISSED = """
select p.waitpoint_id, p.signal_count from flowfabric.waiter w
join flowfabric.execution e on e.partition = w.partition and e.id = w.id and e.is_parked
join flowfabric.waitpoint p on p.partition = w.awaited_partition and p.waitpoint_id = w.awaited_id
where p.signal_count > 0
"""


class Crowd:
    """What the actors share: the executions, the tokens that were handed out, and what was answered."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.roots: list[ExecutionId] = []
        self.points: list[tuple[ExecutionId, UUID, WaitpointToken]] = []
        self.accepted: dict[UUID, Accepted] = {}
        self.repeated: list[tuple[UUID, tuple[ExecutionId, UUID, WaitpointToken]]] = []
        self.refused: Counter[str] = Counter()
        self.acts: Counter[str] = Counter()
        self.working = 0

    async def attempt(self, name: str, call: Any) -> Any:
        """What a call answers, or None when it lost a race."""
        try:
            answer = await call
        except FlowFabricError as refusal:
            self.refused[str(refusal.kind)] += 1
            return None
        self.acts[name] += 1
        return answer

    # A worker that does everything a task may do

    async def work(self, party: Party, chance: random.Random) -> None:
        worker: dict[str, Any] = {"worker_id": "pool", "worker_instance_id": f"pool-{party.pid}", "lease_ttl": LEASE}
        for _ in range(STEPS):
            claimed = await party.claim(**worker)
            if claimed is None:
                await asyncio.sleep(0.002)
            elif claimed.execution_kind == "child":
                await self.attempt("complete", party.complete(claimed.handle))
            else:
                await self.task(party, chance, claimed)

    async def task(self, party: Party, chance: random.Random, claimed: Claimed) -> None:
        condition = chance.choice([on("k"), on("k", "go"), count_signals(2, "k"), from_sources(2, "k")])
        now = await party.connection.fetchval("select flowfabric.now()")
        times: dict[str, Any] = {}
        if chance.random() < 0.7:
            times = {
                "timeout_at": now + timedelta(milliseconds=chance.randrange(40)),
                "timeout_behavior": chance.choice(BEHAVIORS[3:] if chance.random() < 0.9 else BEHAVIORS),
            }
        match chance.randrange(8):
            case 0 | 1:
                answer = await self.attempt(
                    "suspend",
                    party.suspend(
                        claimed.handle,
                        waitpoints=[Fresh(mint_uuid(), "k")],
                        resume_condition=condition,
                        **times,
                    ),
                )
                if isinstance(answer, Suspended):
                    self.hand_out(claimed, answer.details.waitpoint_id, answer.details.waitpoint_token)
            case 2 | 3 | 4 | 5 as how:
                made = await self.attempt(
                    "create waitpoint",
                    party.create_waitpoint(
                        claimed.handle,
                        "k",
                        timedelta(milliseconds=chance.choice([5, 30, 10_000] if how < 4 else [30, 10_000, 10_000])),
                        outlives_attempt=chance.random() < 0.5,
                    ),
                )
                if made is None:
                    return
                self.hand_out(claimed, made.waitpoint_id, made.token)
                await asyncio.sleep(chance.random() * 0.004)
                if how < 4:
                    await self.attempt(
                        "suspend on pending",
                        party.suspend(
                            claimed.handle,
                            waitpoints=[UsePending(made.waitpoint_id)],
                            resume_condition=condition,
                            **times,
                        ),
                    )
                    # When it was satisfied already, or expired, the lease is still there.
                    await self.attempt("release", party.release(claimed.handle))
                else:
                    child = await submit(party, execution_kind="child", priority=1)
                    parked = await self.attempt(
                        "park",
                        party.park(claimed.handle, ends_of=[child][: how - 4], signals_on={made.waitpoint_id: 0}),
                    )
                    if parked is not None and not parked.parked:
                        await self.attempt("release", party.release(claimed.handle))
            case 6:
                await self.attempt("fail", party.fail(claimed.handle, "boom"))
            case _:
                await self.attempt("release", party.release(claimed.handle))

    def hand_out(self, claimed: Claimed, waitpoint: UUID, token: WaitpointToken) -> None:
        self.points.append((claimed.execution_id, waitpoint, token))

    # Senders

    async def send(self, party: Party, chance: random.Random) -> None:
        for number in range(STEPS):
            if not self.points:
                await asyncio.sleep(0.002)
                continue
            await asyncio.sleep(chance.random() * 0.004)
            # Mostly where an execution may be waiting: the newest waitpoint of an execution that has not ended.
            newest = {place[0]: place for place in self.points}
            place = newest.get(chance.choice(self.roots), self.points[-1])
            if chance.random() < 0.1:
                place = chance.choice(self.points)
            signal_id = mint_uuid()
            if self.repeated and chance.random() < 0.2:
                signal_id, place = chance.choice(self.repeated[-5:])
            self.repeated.append((signal_id, place))
            execution_id, waitpoint, token = place
            if chance.random() < 0.2:
                call = party.deliver_approval_signal(
                    execution_id,
                    "default",
                    waitpoint,
                    signal_name="go",
                    idempotency_suffix=f"{party.pid} {number}",
                    source_identity=f"{party.pid}",
                )
            else:
                call = party.deliver_signal(
                    execution_id,
                    waitpoint,
                    token,
                    signal_id=signal_id,
                    signal_name=chance.choice(["go", "go", "other"]),
                    source_type="webhook",
                    source_identity=chance.choice(["a", "b"]),
                    signal_maxlen=chance.choice([0, 1000]),
                )
            answer = await self.attempt("signal", call)
            if isinstance(answer, Accepted):
                assert answer.signal_id not in self.accepted
                self.accepted[answer.signal_id] = answer
                self.acts[answer.effect] += 1
            elif isinstance(answer, DuplicateSignal):
                self.acts["duplicate"] += 1

    # Operators and duties

    async def operate(self, party: Party, chance: random.Random) -> None:
        for _ in range(STEPS):
            for place, root in enumerate(self.roots):
                if (await party.read_outcomes([root])).get(root) is not None:
                    self.roots[place] = await submit(party, policy=RETRY)
            target = chance.choice(self.roots)
            match chance.randrange(12):
                case 0 | 1 | 2:
                    delay = timedelta(milliseconds=chance.choice([0, 0, 5]))
                    await self.attempt("resume", party.resume_execution(target, "operator", delay))
                case 3 | 4 | 5:
                    await self.attempt("expire", party.expire_suspension(target))
                case 6:
                    await self.attempt("cancel", party.cancel(Operator(target), "no longer wanted"))
                case 7:
                    await self.attempt("revoke", party.revoke_lease(target))
                case 8:
                    route = await party.connection.fetchval("select id from flowfabric.route limit 1")
                    await party.raise_floor(route)
                case _:
                    await asyncio.sleep(0.002)

    async def serve(self, party: Party, chance: random.Random) -> None:
        """The duties, while workers run, and then until nothing is due."""
        idle = 0
        while self.working or idle < 2:
            handled = 0
            for kind in chance.sample(KINDS, len(KINDS)):
                done = await party.run_timers(kind, limit=chance.choice([1, 100]))
                assert done.failed == 0, done
                handled += done.handled + done.more
            assert await party.connection.fetch(MISSED) == []
            idle = 0 if handled else idle + 1
            await asyncio.sleep(0.002)

    async def run(self, actors: list[Any]) -> None:
        async def act(actor: Any) -> None:
            self.working += 1
            try:
                await actor
            finally:
                self.working -= 1

        await asyncio.gather(*(act(actor) for actor in actors))


async def drain(stage: Stage, party: Party, crowd: Crowd) -> None:
    """Whatever still waits is woken by its own means, and ends."""
    for _ in range(50):
        await stage.clock.advance(seconds=60)
        for kind in KINDS:
            await party.run_timers(kind)
        for row in await stage.watch.fetch("select partition, id from flowfabric.execution where state = 'suspended'"):
            await party.resume_execution(ExecutionId(row["id"]))
        for claimed in await party.claim_many(worker_id="pool", worker_instance_id="last", limit=100):
            await party.complete(claimed.handle)
        if not await stage.watch.fetchval("select count(*) from flowfabric.execution where completed_at is null"):
            return
    left = await stage.watch.fetch("select state, blocking_detail from flowfabric.execution where completed_at is null")
    raise AssertionError(f"never woken: {left}")


@pytest.mark.both_servers
@pytest.mark.parametrize("seed", sampling.seeds(1, 2))
async def test_concurrent_work_loses_no_signal_and_no_wake_up(stage: Stage, seed: int) -> None:
    await stage.empty()
    parties = await stage.company(9)
    crowd = Crowd(stage)
    crowd.roots = [await submit(parties[0], policy=RETRY) for _ in range(4)]

    def chance(number: int) -> random.Random:
        return random.Random(1000 * seed + number)

    actors = [crowd.work(parties[n], chance(n)) for n in range(3)]
    actors += [crowd.send(parties[n], chance(n)) for n in range(3, 6)]
    actors += [crowd.operate(parties[6], chance(6))]
    duties = asyncio.gather(*(crowd.serve(parties[n], chance(n)) for n in (7, 8)))
    crowd.working += 1
    try:
        await crowd.run(actors)
    finally:
        crowd.working -= 1
        await duties
    await stage.audit()
    assert set(crowd.refused) <= EXPECTED, crowd.refused
    for name in ("suspend", "suspend on pending", "park", "resume_condition_satisfied", "duplicate"):
        assert crowd.acts[name], f"{name} was never tried: {crowd.acts}"

    # What was accepted is recorded, once, and nothing else is; each that resumed closed one suspension.
    stored = await stage.watch.fetch(
        "select signal_id, observed_effect from flowfabric.signal where source_type <> 'system'"
    )
    assert sorted(row["signal_id"] for row in stored) == sorted(crowd.accepted)
    closers = await stage.watch.fetch(
        "select closer_signal_id from flowfabric.suspension where close_reason = 'resumed' and not is_early"
    )
    resumed = [each.signal_id for each in crowd.accepted.values() if each.effect == "resume_condition_satisfied"]
    assert sorted(row["closer_signal_id"] for row in closers) == sorted(resumed)

    await drain(stage, parties[0], crowd)
    await stage.audit()
