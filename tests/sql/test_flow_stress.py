"""Workers, operators, builders and duties on the same few flows, as fast as they can; at the end nothing is stuck.

Every actor has its own connection on which the driver's errors are not hidden, so a deadlock fails the test. What
they do is drawn from a fixed seed; in which order the server takes it is not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.errors import FlowFabricError
from flowfabric.values.attempt import Claimed
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import Edge
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from flowfabric.values.lease import Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh
from tests import sampling
from tests.flow_rules import check_settled, settle_flows
from tests.interleave import Party, Stage

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE = timedelta(minutes=10)
RETRY = ExecutionPolicy(
    retry_policy=ff.RetryPolicy(max_retries=5, backoff=ff.Fixed(timedelta(0))), max_replay_count=1000
)
KINDS = ("lease", "delay", "parked", "suspension")
# The errors that losers of a race get. Anything else is unexpected.
EXPECTED = {
    "cycle_detected", "dependency_already_exists", "execution_already_in_flow", "execution_not_active",
    "execution_not_eligible", "execution_not_suspended", "execution_not_terminal", "flow_already_terminal",
    "flow_not_terminal",
    "invalid_dependency", "invalid_input", "lease_revoked", "not_found", "stale_graph_revision", "stale_lease",
}  # fmt: skip
STEPS = 130


class Crowd:
    """What the actors share: the flows, their members, the edges that are staged, and what was answered."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.members: dict[FlowId, list[ExecutionId]] = {}
        self.edges: dict[FlowId, list[Edge]] = {}
        self.suspended: list[ExecutionId] = []
        self.refused: Counter[str] = Counter()
        self.acts: Counter[str] = Counter()
        self.working = 0

    async def attempt(self, name: str, call: Callable[..., Awaitable[Any]], *given: Any, **named: Any) -> Any:
        """What a call answers, or None when it lost a race."""
        for _ in range(3):
            try:
                answer = await call(*given, **named)
            except asyncpg.SerializationError:
                self.acts["repeated"] += 1
                continue
            except FlowFabricError as refusal:
                self.refused[str(refusal.kind)] += 1
                return None
            self.acts[name] += 1
            return answer
        raise AssertionError(f"{name} could not be serialized three times")

    def pick(self, chance: random.Random) -> tuple[FlowId, list[ExecutionId]]:
        """One of the newest flows, so that the actors meet, and its members."""
        return chance.choice(list(self.members.items())[-3:])

    # Graphs

    async def submit(self, party: Party, chance: random.Random) -> FlowId:
        """A graph of layers, with joins of every kind."""
        names: list[str] = []
        nodes: list[NewNode] = []
        for layer in range(chance.randint(2, 4)):
            before = list(names)
            for number in range(chance.randint(1, 4)):
                ups = chance.sample(before, min(len(before), chance.randint(0 if layer < 2 else 1, 3)))
                name = f"{layer}.{number}"
                names.append(name)
                nodes.append(
                    NewNode(
                        name=name,
                        execution=NewExecution(execution_kind="member", policy=RETRY, priority=layer),
                        after=[
                            NewEdge(upstream=up, data_passing_ref=chance.choice([None, "result"])) for up in sorted(ups)
                        ],
                        policy=self.policy(chance, len(ups)),
                    )
                )
        made = await party.submit_flow(nodes)
        self.members[made.flow_id] = list(made.nodes.values())
        self.edges[made.flow_id] = []
        return made.flow_id

    def policy(self, chance: random.Random, edges: int) -> EdgeGroupPolicy:
        if edges == 0:
            return AllOf()
        rest = chance.choice(list(OnSatisfied))
        return chance.choice([AllOf(), AllOf(), AllSettled(), AnyOf(rest), Quorum(chance.randint(1, edges), rest)])

    async def build(self, party: Party, chance: random.Random) -> None:
        """Grows flows while they run: members, staged edges, applied ones, whole parts."""
        for _ in range(STEPS):
            flow, members = self.pick(chance)
            some = chance.sample(members, min(2, len(members)))
            match chance.randrange(16):
                case 0:
                    await self.submit(party, chance)
                case 1 | 2:
                    parts = [NewEdge(upstream=one) for one in some]
                    node = NewNode(
                        name=f"x{mint_uuid()}",
                        execution=NewExecution(execution_kind="member", policy=RETRY),
                        after=parts,
                        policy=self.policy(chance, len(parts)),
                    )
                    made = await self.attempt("extend", party.extend_flow, flow, [node])
                    if made is not None:
                        members += made.nodes.values()
                case 3:
                    one = await party.create_execution(execution_kind="member", flow_id=flow, policy=RETRY)
                    added = await self.attempt("add", party.add_execution_to_flow, flow, one.execution_id)
                    if added is not None:
                        members.append(one.execution_id)
                case 4 | 5 | 6 | 7 | 8 if len(some) == 2:
                    edge = Edge(edge_id=mint_uuid(), upstream=some[0], downstream=some[1])
                    found = await party.describe_flow(flow)
                    if found is None:
                        continue
                    staged = await self.attempt(
                        "stage",
                        party.stage_dependency_edge,
                        flow,
                        edge_id=edge.edge_id,
                        upstream_execution_id=edge.upstream,
                        downstream_execution_id=edge.downstream,
                        expected_graph_revision=found.graph_revision,
                    )
                    if staged is not None:
                        self.edges[flow].append(edge)
                case _ if self.edges[flow]:
                    edge = chance.choice(self.edges[flow])
                    await self.attempt(
                        "apply",
                        party.apply_dependency_to_child,
                        flow,
                        edge_id=edge.edge_id,
                        upstream_execution_id=edge.upstream,
                        downstream_execution_id=edge.downstream,
                    )
                case _:
                    await asyncio.sleep(0.001)

    # Work

    async def work(self, party: Party, chance: random.Random) -> None:
        worker: dict[str, Any] = {"worker_id": "pool", "worker_instance_id": f"pool-{party.pid}", "lease_ttl": LEASE}
        for _ in range(STEPS):
            claims = await party.claim_many(**worker, limit=chance.choice([1, 3]))
            if not claims:
                await asyncio.sleep(0.001)
            if chance.random() < 0.3:
                await self.attempt("complete many", party.complete_many, [one.handle for one in claims])
                continue
            for claimed in claims:
                await self.task(party, chance, claimed)

    async def task(self, party: Party, chance: random.Random, claimed: Claimed) -> None:
        handle = claimed.handle
        match chance.randrange(12):
            case 0 | 1:
                await self.attempt("fail", party.fail, handle, "boom", failure_class="permanent")
            case 2:
                await self.attempt("retry", party.fail, handle, "boom")
            case 3:
                await self.attempt("release", party.release, handle)
            case 4 | 5:
                await self.attempt("wait_children", party.wait_children, handle)
            case 6:
                bound = [Fresh(mint_uuid(), "k")]
                given = {"waitpoints": bound, "resume_condition": on("k")}
                if await self.attempt("suspend", party.suspend, handle, **given) is not None:
                    self.suspended.append(claimed.execution_id)
            case 7:
                await self.attempt("delay", party.delay, handle, timedelta(milliseconds=chance.randrange(20)))
            case _:
                await asyncio.sleep(chance.random() * 0.004)
                await self.attempt("complete", party.complete, handle, b"r")

    # Operators and duties

    async def operate(self, party: Party, chance: random.Random) -> None:
        for _ in range(STEPS):
            flow, members = self.pick(chance)
            target = chance.choice(members)
            match chance.randrange(14):
                case 0 | 1 | 2 | 3 | 4:
                    await self.attempt("replay", party.replay_execution, target)
                case 5:
                    await self.attempt("cancel", party.cancel, Operator(target), "enough")
                case 6 | 7 if self.suspended:
                    waits = self.suspended.pop()
                    await self.attempt("resume", party.resume_execution, waits, "operator")
                case 8:
                    await self.attempt("revoke", party.revoke_lease, target)
                case 9 if chance.random() < 0.3:
                    chosen = chance.choice(["cancel_all", "cancel_pending", "flow_only"])
                    await self.attempt(
                        "header",
                        party.cancel_flow_header,
                        flow,
                        cancellation_policy=chosen,
                        grace=timedelta(0),
                    )
                case 10:
                    some = chance.sample(members, min(4, len(members)))
                    await self.attempt("replay many", party.replay_many, some)
                case 11 if len(self.members) > 3:
                    oldest = next(iter(self.members))
                    await self.attempt("delete", party.delete_flow, oldest)
                    if await party.describe_flow(oldest) is None:
                        self.members.pop(oldest, None)
                case 12:
                    route = await party.connection.fetchval("select id from flowfabric.route limit 1")
                    await party.raise_floor(route)
                case _:
                    await self.attempt("project", party.project_flow_summary, flow)

    async def serve(self, party: Party, chance: random.Random) -> None:
        """The duties, while workers run."""
        while self.working:
            swept = await party.dispatch_cascades(limit=chance.choice([1, 2, 100]), edges=chance.choice([1, 3, 100]))
            assert swept.failed == 0, swept
            await party.cancel_siblings(limit=chance.choice([1, 100]))
            cancelled = await party.reconcile_cancellations(members=chance.choice([1, 100]))
            assert cancelled.failed == 0, cancelled
            for kind in chance.sample(KINDS, 2):
                done = await party.run_timers(kind, limit=chance.choice([1, 100]))
                assert done.failed == 0, done
            if chance.random() < 0.3:
                await party.project_flow_summaries()
            repaired, _ = await party.reconcile_edges()
            assert repaired.reconciled == 0, "nothing is ever forgotten"


async def drain(stage: Stage, party: Party) -> None:
    """All work that can still run has run; executions that wait for what cannot happen name it."""
    for _ in range(200):
        await settle_flows(party, stage.clock)
        for kind in KINDS:
            await party.run_timers(kind)
        for row in await stage.watch.fetch("select partition, id from flowfabric.execution where state = 'suspended'"):
            await party.resume_execution(ExecutionId(row["id"]))
        claims = await party.claim_many(worker_id="pool", worker_instance_id="last", limit=100)
        for claimed in claims:
            await party.complete(claimed.handle)
        left = await stage.watch.fetch(
            "select id, state, blocking_reason from flowfabric.execution where completed_at is null"
        )
        if not claims and not any(row["state"] in ("active", "suspended", "delayed") for row in left):
            break
    # Only a quorum that was never given enough edges waits forever.
    stuck = await stage.watch.fetch(
        "select e.state, e.blocking_reason, g.policy, g.k, g.n, g.state as group_state from flowfabric.execution e"
        " left join flowfabric.edge_group g on g.partition = e.partition and g.downstream = e.id"
        " where e.completed_at is null and (g.n >= coalesce(g.k, 0)) is not false"
        "   and not exists (select from flowfabric.edge d"
        "       join flowfabric.execution up on up.partition = d.partition and up.id = d.upstream"
        "       where d.partition = e.partition and d.downstream = e.id and d.applied_at is not null"
        "         and d.outcome is null and (up.completed_at is null or d.from_run > up.replays))"
    )
    assert not stuck, stuck


@pytest.mark.both_servers
@pytest.mark.parametrize("seed", sampling.seeds(1, 2))
async def test_concurrent_work_on_flows_leaves_nothing_stuck(stage: Stage, seed: int) -> None:
    await stage.empty()
    parties = await stage.company(7)
    crowd = Crowd(stage)

    def chance(number: int) -> random.Random:
        return random.Random(1000 * seed + number)

    for _ in range(4):
        await crowd.submit(parties[0], chance(99))
    actors = [crowd.work(parties[0], chance(0)), crowd.work(parties[1], chance(1))]
    actors += [
        crowd.build(parties[2], chance(2)),
        crowd.operate(parties[3], chance(3)),
        crowd.operate(parties[4], chance(4)),
    ]
    crowd.working = 1
    duties = asyncio.gather(*(crowd.serve(parties[n], chance(n)) for n in (5, 6)))
    try:
        await asyncio.gather(*actors)
    finally:
        crowd.working = 0
        await duties
    await stage.audit()
    assert set(crowd.refused) <= EXPECTED, crowd.refused
    for name in ("complete", "fail", "wait_children", "replay", "apply", "extend", "header", "resume"):
        assert crowd.acts[name], f"{name} was never tried: {crowd.acts}"
    await drain(stage, parties[0])
    await check_settled(parties[0], stage.watch)
    await stage.audit()
