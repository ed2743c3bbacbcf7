"""Every function, with many rows, while the statistics are wrong: the rows it handles grow with its input only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

import flowfabric as ff
from flowfabric._duties import ALL
from flowfabric._duties.lead import CASCADES, DUTIES
from flowfabric._duties.timer import TimerDuty, WokenDuty
from flowfabric._postgres import statements
from flowfabric.engine.acting import Actor
from flowfabric.engine.edges import EdgePlace
from flowfabric.engine.timers import TimerKind
from flowfabric.errors import FlowFabricError
from flowfabric.values.attempt import Claimed, Failure
from flowfabric.values.binding import Bind
from flowfabric.values.budget import Report, Reserve, Reserved, Settle, Usage
from flowfabric.values.bulk import ExecutionFilter
from flowfabric.values.conditions import all_of, any_of, count_signals, from_sources, on
from flowfabric.values.event import EventCursor, EventFilter
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import Edge
from flowfabric.values.graph import FlowSubmitted, NewEdge, NewNode
from flowfabric.values.ids import ExecutionId, FlowId, mint_uuid
from flowfabric.values.joins import AnyOf, OnSatisfied
from flowfabric.values.kept_answer import AnswerKey
from flowfabric.values.lease import Operator
from flowfabric.values.operator_audit import AuditFilter
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.quota import QuotaPlace
from flowfabric.values.step import NewStep
from flowfabric.values.stream import START, BestEffortLive, DurableSummary, NewFrame
from flowfabric.values.wait import Fresh
from tests import sampling
from tests.databases import fresh_database
from tests.ids import home
from tests.sql.plans import STATISTICS, CountingEngine
from tests.support import WORKER, new_id

N = 500  # of a batch: quadratic work is far above the bound, linear work far below
LONG = timedelta(days=30)
HOUR = timedelta(hours=1)
SLOW = all_of(count_signals(10 * N, "k"), from_sources(10 * N, "k", "l"), any_of("k", "l", n=2))
# Each primary key that nothing refers to, made anew. Those of partitions belong to their table's.
PRIMARY_KEYS = """
select format('alter table %s drop constraint %I; alter table %1$s add constraint %2$I %s',
              conrelid::regclass, conname, pg_get_constraintdef(oid)) as turn
from pg_constraint c
where contype = 'p' and connamespace = 'flowfabric'::regnamespace and conparentid = 0
  and not exists (select from pg_inherits i where i.inhrelid = c.conrelid)
  and not exists (select from pg_constraint f where f.contype = 'f' and f.conindid = c.conindid)
"""
ENDLESS = ff.RetryPolicy(max_retries=100, backoff=ff.Fixed(HOUR))

pytestmark = pytest.mark.xdist_group("plans")  # the databases are filled once


def node(name: str, *after: str, **fields: Any) -> NewNode:
    edges = [NewEdge(upstream=up, passes_result=True, edge_id=mint_uuid()) for up in after]
    return NewNode(name=name, execution=NewExecution(execution_kind=f"node {name[:1]}"), after=edges, **fields)


class Ground:
    """A database with thousands of rows in every table that can have them."""

    def __init__(self, engine: CountingEngine, dsn: str) -> None:
        self.engine = engine
        self.sql = engine.connection
        self.dsn = dsn
        self.held: list[Claimed] = []

    # Ways into it

    async def some(self, kind: str | Callable[[int], str], count: int = N, **fields: Any) -> list[ExecutionId]:
        given = {"execution_kind": kind, **fields}
        items = [NewExecution(**{k: v(n) if callable(v) else v for k, v in given.items()}) for n in range(count)]
        made = await self.engine.create_many(items)
        assert not [one for one in made if isinstance(one, FlowFabricError)], made[0]
        return [one.execution_id for one in made]  # type: ignore[union-attr]

    async def claimed(self, kind: str, count: int = N, lease_ttl: timedelta = LONG) -> list[Claimed]:
        found = await self.engine.claim_many(limit=count, kinds=[kind], lease_ttl=lease_ttl, **WORKER)
        assert len(found) == count
        return found

    async def one(self, kind: str, **fields: Any) -> Claimed:
        await self.some(kind, 1, **fields)
        return (await self.claimed(kind, 1))[0]

    async def pending(self, kind: str, signals: int, *keys: str, outlives: bool = False) -> tuple[Claimed, list[UUID]]:
        """A leased execution with pending waitpoints, and that many signals recorded on the first."""
        held = await self.one(kind)
        made = [await self.engine.create_waitpoint(held.handle, key, LONG, outlives_attempt=outlives) for key in keys]
        self.tokens.update({one.waitpoint_id: one.token for one in made})
        await self.signals(held, made[0].waitpoint_id, keys[0], signals)
        return held, [one.waitpoint_id for one in made]

    tokens: dict[UUID, Any]

    async def signals(self, held: Claimed, waitpoint: UUID, key: str, count: int) -> None:
        """Record signals, each of another sender, as many calls would."""
        await self.sql.execute(
            "insert into flowfabric.signal (partition, id, ordinal, signal_id, waitpoint_id, waitpoint_key,"
            " signal_name, signal_category, source_type, source_identity, correlation_id, payload, payload_encoding,"
            " idempotency_key, target_scope, created_at, accepted_at, observed_effect, match_detail)"
            " select $1, $2, n, gen_random_uuid(), $3, $4, 'go', 'external', 'webhook', 'sender ' || n, '', '\\x',"
            " 'json', 'key ' || n, 'waitpoint', flowfabric.now(), flowfabric.now(), 'buffered_for_pending_waitpoint',"
            " 'not_evaluated' from generate_series(1, $5) n",
            home(held.execution_id), held.execution_id, waitpoint, key, count,
        )  # fmt: skip
        await self.sql.execute(
            "update flowfabric.waitpoint set signal_count = $3, last_signal_at = flowfabric.now()"
            " where partition = $1 and waitpoint_id = $2",
            home(held.execution_id), waitpoint, count,
        )  # fmt: skip

    async def send(self, held: Claimed, waitpoint: UUID, **fields: Any) -> Any:
        given = {"signal_name": "go", "source_type": "webhook", "source_identity": "one more", **fields}
        return await self.engine.deliver_signal(held.execution_id, waitpoint, self.tokens[waitpoint], **given)

    async def later(self, **parts: float) -> None:
        await self.sql.execute("update flowfabric.clock set shift = shift + $1", timedelta(**parts))

    async def in_an_hour(self) -> Any:
        return await self.sql.fetchval("select flowfabric.now() + interval '1 hour'")

    # What is in it

    async def fill(self) -> None:
        engine = self.engine
        self.tokens = {}
        policy = ExecutionPolicy(retry_policy=ENDLESS)
        self.waiting = await self.some(
            "waiting", N, tags={"a.b": "c"}, idempotency_key=lambda n: f"key {n}", namespace="space"
        )
        await self.some("waiting", N)
        await self.some("held", policy=policy)
        self.held = await self.claimed("held")
        await self.some("short")
        self.short = await self.claimed("short", lease_ttl=timedelta(seconds=5))
        self.delayed = await self.some("delayed", delay_until=timedelta(minutes=1))
        await self.some("done")
        self.done = await self.claimed("done")
        await engine.complete_many([one.handle for one in self.done])
        await self.some(lambda n: f"kind {n}", 2 * N, lane_id="far")
        await self.some("retried", policy=policy)
        await engine.fail_many([Failure(authority=one.handle, reason="no") for one in await self.claimed("retried")])
        await self.some("granted", 5 * 64)
        for _ in range(5):
            await engine.claim_for_worker(max_grants=64, grant_ttl=timedelta(minutes=1), kinds=["granted"], **WORKER)
        self.cancelled = await self.some("cancelled")
        await engine.cancel_many(self.cancelled, "enough")
        await self._waits()
        await self._steps()
        await self._flows()
        await self._others()
        await self._limits()
        await self._budgets()
        await self._server()

    async def _server(self) -> None:
        """As many API keys, rows of the audit log, kept answers and bulk jobs as a busy server has."""
        for statement in (
            "insert into flowfabric.api_key (id, name, digest, scopes, hides_payloads, created_at)"
            " select lpad(to_hex(n), 12, '0'), 'key ' || n, '\\x00', '{read}', false, flowfabric.now()"
            " from generate_series(1, $1) n",
            "insert into flowfabric.operator_audit (at, actor, operation, outcome)"
            " select flowfabric.now(), 'a', 'o', 'ok' from generate_series(1, $1)",
            "insert into flowfabric.kept_answer"
            " (key_id, operation, idempotency_key, request, holder, status, expires_at)"
            " select '', 'o', 'key ' || n, 'r', gen_random_uuid(), 200, flowfabric.now() + interval '1 day'"
            " from generate_series(1, $1) n",
            "insert into flowfabric.bulk_job"
            " (id, operation, state, actor, created_at, ended_at, states, created_before)"
            " select gen_random_uuid(), 'cancel', 'done', 'a', n.at, n.at, '{}', n.at"
            " from generate_series(1, $1), (select flowfabric.now() as at) n",
        ):
            await self.sql.execute(statement, 3 * N)
        await self.engine.create_bulk("cancel", ExecutionFilter(kinds=("waiting",)), actor="a", bulk_id=BULK)

    async def _waits(self) -> None:
        engine = self.engine
        self.buffered, self.buffer = await self.pending("buffered", 3 * N, "k", "l")
        self.lone, self.lone_points = await self.pending("lone", 0, "k")
        self.crowd, self.crowd_points = await self.pending("crowd", 1, *(f"k{n}" for n in range(200)))
        self.counting, self.count_points = await self.pending("counting", 3 * N, "k", "l")
        await engine.suspend_on(self.counting.handle, self.count_points, SLOW, timeout_at=await self.in_an_hour())
        self.task = await self.one("task")
        wait = await engine.open_wait(self.task.handle, "wait", 0, ["k"], None)
        self.task_points = [one.waitpoint_id for one in wait.waitpoints]
        self.tokens.update({one.waitpoint_id: one.waitpoint_token for one in wait.waitpoints})
        await self.signals(self.task, self.task_points[0], "k", 3 * N)
        await self.some("sleeping")
        self.sleeping = await self.claimed("sleeping")
        for held in self.sleeping[:100]:
            await engine.suspend(
                held.handle, waitpoints=[Fresh(new_id(), "k")], resume_condition=on("k"),
                timeout_at=await self.in_an_hour(),
            )  # fmt: skip

    async def _steps(self) -> None:
        self.stepped = await self.one("stepped")
        for part in range(3):
            await self.engine.record_steps([(self.stepped.handle, NewStep(name=f"step {part} {n}")) for n in range(N)])
        self.streaming = await self.one("streaming")
        for _ in range(3):
            # A row for each frame, as many calls would write them.
            frames = [NewFrame(payload=b"x", frame_type=f"type {n % 2}") for n in range(N)]
            await self.engine.append_frames([(self.streaming.handle, frame) for frame in frames])
        for mode in (DurableSummary(), BestEffortLive(ttl=HOUR, maxlen_floor=2000)):
            for n in range(70):
                frame = NewFrame(payload=b'{"a": %d}' % n, mode=mode)
                await self.engine.append_frame(self.streaming.handle, frame)
        self.parent = await self.one("parent")
        self.children = await self.some("child")
        self.offspring = await self.some("offspring")
        hub = await self.one("hub")
        await self.some("parked")
        for held in (await self.claimed("parked"))[:200]:
            await self.engine.park(held.handle, ends_of=[hub.execution_id])
        self.family = await self.one("family", execution_id=self.engine.mint_id(parent_id=self.offspring[0]))
        await self.sql.execute(
            "update flowfabric.execution set parent_id = $1 where id = any ($2)",
            self.family.execution_id,
            self.offspring,
        )

        # Children of parents that were cancelled, and are still to be cancelled.
        young = await self.some("young")
        self.bereft = await self.some("bereft", execution_id=lambda n: self.engine.mint_id(parent_id=young[n]))
        await self.sql.execute(
            "update flowfabric.execution e set parent_id = u.parent from unnest($1::uuid[], $2::uuid[]) u (parent, id)"
            " where e.id = u.id",
            self.bereft, young,
        )  # fmt: skip
        await self.engine.cancel_many(self.bereft, "enough")

    async def _flows(self) -> None:
        engine = self.engine
        self.wide = await self.flow()
        self.chain = await engine.submit_flow([node("c0"), *(node(f"c{n}", f"c{n - 1}") for n in range(1, N))])
        ups = [f"u{n}" for n in range(N - 1)]
        any_one = AnyOf(OnSatisfied.CANCEL_REMAINING)
        self.choice = await engine.submit_flow([*(node(u) for u in ups), node("y", *ups, policy=any_one)])
        self.loose = await engine.create_flow(flow_kind="loose")
        self.members = await self.some("member", flow_id=self.loose.flow_id)
        await engine.add_executions_to_flow(self.loose.flow_id, self.members)
        self.strangers = await self.some("member", flow_id=self.loose.flow_id)
        doomed = await self.flow()  # its members are to be cancelled, but not yet
        await engine.cancel_flow_header(doomed.flow_id, reason="enough", grace=LONG)
        await self.sql.execute(
            "insert into flowfabric.flow (partition, flow_id, flow_kind, namespace, created_at, last_mutation_at)"
            " select flowfabric.partition_of(f.id, 256), f.id, 'empty', 'space', flowfabric.now(), flowfabric.now()"
            " from (select gen_random_uuid() as id from generate_series(1, $1)) f",
            3 * N,
        )
        await self.sql.execute("insert into flowfabric.flow_touched select partition, flow_id from flowfabric.flow")
        await engine.project_flow_summaries(limit=4 * N)

    async def flow(self) -> FlowSubmitted:
        """One member, many after it, one after all of these."""
        middle = [f"m{n}" for n in range(N - 2)]
        return await self.engine.submit_flow([node("a"), *(node(m, "a") for m in middle), node("z", *middle)])

    async def fire(self, items: list[NewExecution]) -> Any:
        at = await self.sql.fetchval("select next_at from flowfabric.schedule where name = 's7'")
        return await self.engine.fire_schedule("s7", at, next_at=None, fired_at=at, items=items)

    async def _others(self) -> None:
        await self.sql.execute(
            "insert into flowfabric.watch select n % 256, gen_random_uuid(), 'ended', gen_random_uuid(), 'infinity'"
            " from generate_series(1, 1500) n;"
            "insert into flowfabric.schedule (name, kind, timing, catch_up, payload, options, next_at, created_at,"
            " updated_at) select 's' || n, 'k', '{}', 'skip', '', '{}', flowfabric.now(), flowfabric.now(),"
            " flowfabric.now() from generate_series(1, 1500) n;"
            "insert into flowfabric.lead select 'lead ' || n, gen_random_uuid(), flowfabric.now()"
            " from generate_series(1, 100) n;"
            # The past, which submissions and claims must not read.
            "insert into flowfabric.sleeper select l, clock_timestamp() - n * interval '1 ms', gen_random_uuid(), 1, 1"
            " from generate_series(1, 3000) n, unnest('{\"\",default,lane}'::text[]) l;"
            "select flowfabric.register_worker(case when n % 2 = 0 then '' else 'space' end, 'worker-' || n, 'pool',"
            " '{default}', '{waiting}', null, null, '{}', case when n % 3 = 0 then 60000 else 2600000000 end, 1, null,"
            " null, null, null, false) from generate_series(1, 1500) n;"
            "insert into flowfabric.worker_event (occurred_at, event, namespace, worker_instance_id, worker_id)"
            " select flowfabric.now(), 'heartbeat', '', 'worker-2', 'pool' from generate_series(1, 1500) n;"
        )

    async def _limits(self) -> None:
        """Under a policy with room many wait and many run; under a full one many are held back."""
        engine = self.engine
        make = engine.create_quota_policy
        self.room = (await make(name="room", max_concurrent=10**6, max_requests_per_window=10**6)).quota_policy_id
        self.full = (await make(name="full", max_concurrent=1)).quota_policy_id
        self.keyed = (await make(name="keyed", key="t", max_concurrent=2)).quota_policy_id
        for n in range(N):
            await engine.bind_limit(self.keyed, Bind(kind="bound" if n % 2 else "unbound", tag=("t", str(n))))
        for _ in range(2):
            await self.some("room", 2 * N, policy=ExecutionPolicy(quota_policy_id=self.room))
        self.running = [*(await self.claimed("room")), *(await self.claimed("room"))]
        await self.some("spread", N, policy=ExecutionPolicy(quota_policy_id=self.keyed), tags=lambda n: {"t": str(n)})
        await self.some("full", 2 * N, policy=ExecutionPolicy(quota_policy_id=self.full))
        (self.owner,) = await engine.claim_many(limit=N, kinds=["full"], lease_ttl=LONG, **WORKER)
        self.shut = await self.some("full", N, policy=ExecutionPolicy(quota_policy_id=self.full))

    async def _budgets(self) -> None:
        """One budget with many keys, entries of its ledger, reservations and executions that wait; and many others."""
        engine = self.engine
        made = await engine.create_budget(name="spent", dimensions=["t"], hard_limits=[10**9], soft_limits=[0])
        self.spent = made.budget_id
        await self.some("spending", policy=ExecutionPolicy(budget_ids=(self.spent,)))
        self.spending = await self.claimed("spending")
        reserve = [Reserve(authority=one.handle, usage=Usage(custom={"t": 1})) for one in self.spending]
        self.reserved = [one.reservation_id for one in await engine.use_budgets(reserve) if isinstance(one, Reserved)]
        await engine.use_budgets([
            Report(authority=one.handle, usage=Usage(custom={"t": 1}, dedup_key=f"key {n}"))
            for n, one in enumerate(self.spending)
        ])  # fmt: skip
        for name in ("first", "second"):
            await engine.use_budgets([
                Report(authority=one.handle, usage=Usage(custom={"t": 1}), place=(name, 0)) for one in self.spending
            ])  # fmt: skip
        await self.sql.execute(
            "insert into flowfabric.budget_spend select $1, e.id, 0, 't', 1, flowfabric.now(), true"
            " from (select x.id from flowfabric.execution x order by x.id limit $2) e",
            self.spent, N,
        )  # fmt: skip
        await engine.report_usage_admin(self.spent, dimensions=["t"], deltas=[N])
        for n in range(300):
            await engine.create_budget(name=f"other {n}", dimensions=["t"], hard_limits=[5], soft_limits=[0])
        full = await engine.create_budget(name="exhausted", dimensions=["t"], hard_limits=[1], soft_limits=[0])
        self.exhausted = full.budget_id
        await engine.report_usage_admin(self.exhausted, dimensions=["t"], deltas=[1])
        await self.some("poor", policy=ExecutionPolicy(budget_ids=(self.exhausted,)))
        await engine.claim_many(limit=10, kinds=["poor"], **WORKER)

    async def complete(self, kind: str, count: int) -> None:
        await self.engine.complete_many([one.handle for one in await self.claimed(kind, count)])


Step = Callable[[Ground], Awaitable[Any]]


@dataclass(frozen=True)
class Call:
    """A function, how many items a call hands it, the call, and what must have happened before."""

    function: str
    items: int
    call: Step
    before: Step | None = None


async def flow_ended(g: Ground) -> None:
    """All members of the wide flow are completed."""
    await g.complete("node a", 1)
    await g.engine.dispatch_cascades(edges=10 * N)
    await g.complete("node m", N - 2)
    await g.engine.dispatch_cascades(limit=10 * N, edges=10 * N)
    await g.complete("node z", 1)


async def first_ended(g: Ground) -> None:
    await g.complete("node a", 1)


async def one_chosen(g: Ground) -> None:
    """The join of the choice is decided; the others are to be cancelled."""
    await g.complete("node u", 1)
    await g.engine.dispatch_cascades()


async def family_cancelled(g: Ground) -> None:
    await g.engine.cancel(g.family.handle, "enough")


async def offspring_cancelled(g: Ground) -> None:
    await g.sql.execute(
        "insert into flowfabric.step (partition, id, generation, name, n, kind, run, attempt_index, child_partition,"
        " child_id, recorded_at) select e.partition, e.parent_id, 0, 'c', row_number() over (), 'submit', 0, 0,"
        " e.partition, e.id, e.created_at from flowfabric.execution e where e.parent_id = $1",
        g.family.execution_id,
    )
    await family_cancelled(g)
    await g.engine.cancel_children(limit=N)


async def offspring_ended(g: Ground) -> None:
    await g.engine.complete_many([one.handle for one in await g.claimed("offspring")])
    await g.later(days=8)


async def flow_cancelled(g: Ground) -> None:
    await g.engine.cancel_flow(g.wide.flow_id, reason="enough", grace=timedelta(0))
    await g.later(seconds=1)


async def middle_ended(g: Ground) -> None:
    await first_ended(g)
    await g.engine.dispatch_cascades(edges=10 * N)
    await g.complete("node m", N - 2)


async def days_later(g: Ground) -> None:
    await g.later(days=40)


async def with_hooks(g: Ground) -> None:
    """As many tasks of hooks are due as a call submits; many more are not."""
    await g.sql.execute(
        'insert into flowfabric.hook (spec, facts, due_at) select \'{"kind": "told"}\', \'{"execution_id": "x"}\','
        " flowfabric.now() + case when n <= $1 then interval '0' else interval '1 day' end"
        " from generate_series(1, 10 * $1) n",
        N,
    )


async def an_hour_later(g: Ground) -> None:
    await g.later(hours=2)


async def with_marked(g: Ground) -> None:
    """The ends of their leases found the budget locked."""
    await g.later(hours=2)
    await g.engine.connection.execute(
        "update flowfabric.reservation set lost = true, lost_at = flowfabric.now() where state = 'held'"
    )


def timers(kind: TimerKind) -> Step:
    return lambda g: g.engine.run_timers(kind)


def ids(held: list[Claimed]) -> list[ExecutionId]:
    return [one.execution_id for one in held]


async def claim_grant(g: Ground) -> None:
    await g.engine.issue_claim_grant(g.waiting[0], **WORKER)


async def lost(g: Ground) -> None:
    """A thousand leases have expired."""
    await g.later(minutes=10)
    await g.engine.run_timers(TimerKind.LEASE)


async def reclaim_grant(g: Ground) -> None:
    await lost(g)
    await g.engine.issue_reclaim_grant(g.short[0].execution_id, **WORKER)


async def join_released(g: Ground) -> None:
    """All upstreams of the join have completed."""
    await first_ended(g)
    await g.engine.dispatch_cascades(edges=10 * N)
    await g.complete("node m", N - 2)
    await g.engine.dispatch_cascades(limit=10 * N, edges=10 * N)


async def claim_join(g: Ground) -> None:
    await join_released(g)
    await g.engine.issue_claim_grant(g.wide.nodes["z"], **WORKER)


async def buffered_ended(g: Ground) -> None:
    await g.engine.complete(g.buffered.handle)


async def stepped_ended(g: Ground) -> None:
    await g.engine.complete(g.stepped.handle)


async def parked(g: Ground) -> None:
    """Executions are parked until another one ends."""
    for held in g.held[:50]:
        await g.engine.park(held.handle, ends_of=[g.parent.execution_id])


async def edges_staged(g: Ground) -> None:
    first, *others = g.members
    await g.engine.stage_and_apply_edges(
        g.loose.flow_id, [Edge(edge_id=mint_uuid(), upstream=one, downstream=first) for one in others],
        expected_graph_revision=N,
    )  # fmt: skip


async def one_edge_staged(g: Ground) -> None:
    await edges_staged(g)
    await g.engine.stage_dependency_edge(
        g.loose.flow_id, edge_id=EDGE, upstream_execution_id=g.members[1], downstream_execution_id=g.members[2],
        expected_graph_revision=2 * N - 1,
    )  # fmt: skip


EDGE = mint_uuid()


async def resolve(g: Ground) -> Any:
    return await g.engine.resolve_dependency(
        g.wide.flow_id, edge_id=g.edge.edge_id, upstream_execution_id=g.edge.upstream_execution_id,
        downstream_execution_id=g.edge.downstream_execution_id, outcome="success",
    )  # fmt: skip


async def found_edge(g: Ground) -> None:
    (g.edge,) = await g.engine.list_edges(g.wide.flow_id, incoming=g.wide.nodes["m7"])
    await first_ended(g)


async def touched(g: Ground) -> None:
    await g.complete("node u", N - 1)


async def summed(g: Ground) -> None:
    await g.engine.project_flow_summary(g.wide.flow_id)


def later_items(count: int) -> list[NewExecution]:
    return [NewExecution(execution_kind="fired") for _ in range(count)]


async def more(g: Ground) -> Any:
    nodes = [
        NewNode(name=f"n{n}", execution=NewExecution(execution_kind="n"), after=[NewEdge(upstream=g.wide.nodes["z"])])
        for n in range(N)
    ]
    return await g.engine.extend_flow(g.wide.flow_id, nodes)


async def suspend_on_buffer(g: Ground) -> Any:
    return await g.engine.suspend_on(g.buffered.handle, g.buffer, SLOW)


async def suspend_satisfied(g: Ground) -> Any:
    return await g.engine.suspend_on(g.buffered.handle, g.buffer, from_sources(2 * N, "k", "l"),
    )  # fmt: skip


async def answered(g: Ground) -> None:
    await g.engine.settle_wait(g.task.handle, "wait", 0, count_signals(N, "k"))


async def refused(g: Ground) -> None:
    signals = (await g.engine.read_signals(g.task.execution_id, limit=N)).items
    await g.engine.refuse_signals(g.task.handle, "wait", 0, {one.signal_id: "does not fit" for one in signals})


async def task_suspended(g: Ground) -> None:
    await g.engine.settle_wait(g.task.handle, "wait", 0, count_signals(10 * N, "k"))


async def stopped(g: Ground) -> None:
    await g.engine.stop_changed(g.held[3].handle, detail="a", digest="d")


async def declared(g: Ground) -> None:
    await g.sql.execute(
        "insert into flowfabric.declared_limit select 'budget ' || n, 'x', flowfabric.now()"
        " from generate_series(1, $1) n",
        3 * N,
    )


def a_key_id(number: int) -> str:
    """The id of one of the API keys of the ground."""
    return f"{number:012x}"


def an_answer(key: str) -> AnswerKey:
    return AnswerKey(key_id="", operation="o", idempotency_key=key, holder=UUID(int=1))


async def replays(g: Ground) -> None:
    await g.engine.create_bulk("replay", ExecutionFilter(kinds=("done",)), actor="a", bulk_id=REPLAYS)


BULK = mint_uuid()
REPLAYS = mint_uuid()
T = TimerKind
QUEUES = [duty.name for duty in ALL if issubclass(duty, WokenDuty) and not issubclass(duty, TimerDuty)]
BAD: Any = {"retry_policy": "nonsense"}
CALLS = [
    # executions
    Call("create_executions", N, lambda g: g.some("new")),
    Call("create_executions", N, lambda g: g.some(
        "new", idempotency_key=lambda n: f"key {n + N // 2}", tags={"a.b": "c"}, delay_until=HOUR, namespace="space",
        lane_id=lambda n: f"lane {n % 10}")),
    Call("create_executions", N, lambda g: g.some("new", execution_id=lambda n: g.waiting[n])),
    Call("create_executions", N, lambda g: g.some(lambda n: f"kind {n}", N, lane_id="far")),
    Call("create_executions", N, lambda g: g.some(lambda n: f"new kind {n}", N, lane_id="far")),
    Call("create_one", 1, lambda g: g.some("waiting", 1)),
    Call("standing_executions", N, lambda g: g.engine.create_many([
        NewExecution(execution_kind="new", idempotency_key=f"key {n}", policy=BAD) for n in range(N)])),
    Call("complete", N, lambda g: g.engine.complete_many([one.handle for one in g.held])),
    Call("complete", 50, lambda g: g.engine.complete(g.parent.handle), parked),
    Call("complete", 1, lambda g: g.engine.complete(g.buffered.handle)),
    Call("fail", N, lambda g: g.engine.fail_many([Failure(authority=one.handle, reason="no") for one in g.held])),
    Call("fail", N, lambda g: g.engine.fail_many([Failure(authority=one.handle, reason="no") for one in g.sleeping])),
    Call("cancel_as_operator", N, lambda g: g.engine.cancel_many(g.waiting, "enough")),
    Call("cancel_as_operator", N, lambda g: g.engine.cancel_many(ids(g.sleeping), "enough")),
    Call("cancel_as_operator", N, lambda g: g.engine.cancel_many(list(g.choice.nodes.values()), "enough")),
    Call("cancel", 1, lambda g: g.engine.cancel(g.held[3].handle, "enough")),
    Call("complete_as_operator", 1, lambda g: g.engine.complete(Operator(g.held[3].execution_id))),
    Call("complete_as_operator", 50, lambda g: g.engine.complete(Operator(g.parent.execution_id)), parked),
    Call("fail_as_operator", 1, lambda g: g.engine.fail(Operator(g.held[3].execution_id), "no")),
    Call("fail_as_operator", 1, lambda g: g.engine.fail(Operator(g.held[3].execution_id), "no"), stopped),
    Call("unblock", 1, lambda g: g.engine.unblock_execution(g.held[3].execution_id), stopped),
    Call("replay", N, lambda g: g.engine.replay_many(ids(g.done))),
    Call("replay", N, lambda g: g.engine.replay_many(g.bereft)),
    Call("replay", N, lambda g: g.engine.replay_many([one for name, one in g.wide.nodes.items() if name[0] == "m"]),
         flow_ended),
    Call("delete_execution", 3 * N, lambda g: g.engine.delete_execution(g.buffered.execution_id), buffered_ended),
    Call("delete_execution", 3 * N, lambda g: g.engine.delete_execution(g.stepped.execution_id), stepped_ended),
    Call("redact_execution", 3 * N, lambda g: g.engine.redact_execution(g.buffered.execution_id), buffered_ended),
    Call("redact_execution", 3 * N, lambda g: g.engine.redact_execution(g.stepped.execution_id), stepped_ended),
    Call("change_priority", 1, lambda g: g.engine.change_priority(g.waiting[3], 5)),
    Call("block", 1, lambda g: g.engine.block_execution_for_admission(g.waiting[3], "waiting_for_budget")),
    Call("unblock", 1, lambda g: g.engine.unblock_execution(g.waiting[3]),
         lambda g: g.engine.block_execution_for_admission(g.waiting[3], "waiting_for_budget")),
    Call("free_key", 1, lambda g: g.engine.free_key(g.waiting[3], "key 3", namespace="space")),
    Call("set_tag", 1, lambda g: g.engine.set_execution_tag(g.waiting[3], "a.c", "d")),
    # claims and leases
    Call("claim", N, lambda g: g.engine.claim_many(limit=N, **WORKER)),
    Call("claim", N, lambda g: g.engine.claim_many(limit=N, kinds=["waiting"], **WORKER)),
    Call("claim", N, lambda g: g.engine.claim_many(limit=N, kinds=["short"], **WORKER), lost),
    Call("claim", N, lambda g: g.engine.claim_many(limit=1, kinds=["node z"], **WORKER), join_released),
    Call("claim", N, lambda g: g.engine.claim_many(limit=N, kinds={"waiting": [2, 1]}, **WORKER)),
    Call("claim", N, lambda g: g.engine.claim_many(limit=N, namespace="space", **WORKER)),
    Call("claim", 10, lambda g: g.engine.claim_many(limit=1, **WORKER)),
    Call("claim_for_worker", 64, lambda g: g.engine.claim_for_worker(max_grants=64, **WORKER)),
    Call("claim_for_worker", 64, lambda g: g.engine.claim_for_worker(max_grants=64, namespace="space", **WORKER)),
    Call("claim", N, lambda g: g.engine.claim_many("far", limit=50, **WORKER)),  # of a thousand kinds
    Call("claim_lanes", N, lambda g: g.engine.claim_lanes({"default": 3, "other": 1}, limit=N, **WORKER)),
    Call("claim_lanes", N, lambda g: g.engine.claim_lanes(
        {f"none {n}": 1 for n in range(2 * N)} | {"far": 1}, limit=1, **WORKER)),
    Call("sleep_for_work", 1, lambda g: g.engine.sleep_for_work(["default"], HOUR, kinds=["waiting"])),
    Call("register_service", 1, lambda g: g.engine.sleep_for_work(["default"], HOUR, kinds=[f"kind {new_id()}"])),
    Call("renew", N, lambda g: g.engine.renew_many([one.handle for one in g.held])),
    Call("renew", 2 * N, lambda g: g.engine.renew_many([one.handle for one in g.held], waits=False)),
    Call("progress", 1, lambda g: g.engine.progress(g.held[3].handle, percent=3)),
    Call("delay", 1, lambda g: g.engine.delay(g.held[3].handle, HOUR)),
    Call("release", 1, lambda g: g.engine.release(g.held[3].handle)),
    Call("release", 1, lambda g: g.engine.release(g.buffered.handle)),
    Call("stop_changed", 1, lambda g: g.engine.stop_changed(g.held[3].handle, detail="a", digest="d")),
    Call("stop_changed", 3 * N, lambda g: g.engine.stop_changed(g.stepped.handle, detail="a", digest="d")),
    Call("wait_children", 1, lambda g: g.engine.wait_children(g.held[3].handle)),
    Call("delay_as_operator", 1, lambda g: g.engine.delay(Operator(g.held[3].execution_id), HOUR)),
    Call("release_as_operator", 1, lambda g: g.engine.release(Operator(g.held[3].execution_id))),
    Call("wait_children_as_operator", 1, lambda g: g.engine.wait_children(Operator(g.held[3].execution_id))),
    Call("revoke_lease", 1, lambda g: g.engine.revoke_lease(g.held[3].execution_id)),
    Call("list_expired_leases", N, lambda g: g.engine.list_expired_leases(), an_hour_later),
    # grants
    Call("issue_claim_grant", 1, lambda g: g.engine.issue_claim_grant(g.waiting[3], **WORKER)),
    Call("issue_reclaim_grant", 1, lambda g: g.engine.issue_reclaim_grant(g.short[3].execution_id, **WORKER), lost),
    Call("verify_grant", 1, lambda g: g.engine.verify_grant(g.waiting[0], "k1:nonsense"), claim_grant),
    Call("claim_granted", 1, lambda g: g.engine.claim_execution(
        g.waiting[0], lease_id=new_id(), attempt_id=new_id(), **WORKER), claim_grant),
    Call("claim_granted", N, lambda g: g.engine.claim_execution(
        g.wide.nodes["z"], lease_id=new_id(), attempt_id=new_id(), **WORKER), claim_join),
    Call("claim_as_operator", 1, lambda g: g.engine.issue_grant_and_claim(g.waiting[3])),
    Call("reclaim", 1, lambda g: g.engine.reclaim_execution(
        g.short[0].execution_id, lease_id=new_id(), attempt_id=new_id(), **WORKER), reclaim_grant),
    Call("scan_eligible", N, lambda g: g.engine.scan_eligible_executions("default", limit=N)),
    # steps
    Call("record_steps", N, lambda g: g.engine.record_steps(
        [(g.stepped.handle, NewStep(name=f"new {n}")) for n in range(N)])),
    Call("record_steps", N, lambda g: g.engine.record_steps([(one.handle, NewStep(name="new")) for one in g.held])),
    Call("fork_execution", 100, lambda g: g.engine.fork_execution(g.done[3].execution_id, before_step=None)),
    Call("fork_execution", 3 * N, lambda g: g.engine.fork_execution(
        g.stepped.execution_id, before_step=None), stepped_ended),
    Call("fork_execution", 3 * N, lambda g: g.engine.fork_execution(
        g.stepped.execution_id, before_step=("step 2 7", 0)), stepped_ended),
    Call("read_steps", 3 * N, lambda g: g.engine.read_steps([g.stepped.execution_id])),
    Call("read_steps", N, lambda g: g.engine.read_steps(ids(g.held))),
    # No index has the order in which they were recorded: all steps of the execution are looked at.
    Call("read_steps", 3 * N, lambda g: g.engine.read_steps([g.stepped.execution_id], limit=5)),
    # streams
    Call("append_frames", N, lambda g: g.engine.append_frames(
        [(one.handle, NewFrame(payload=b"x")) for one in g.held])),
    Call("append_frames", N, lambda g: g.engine.append_frames(
        [(g.streaming.handle, NewFrame(payload=b"x", frame_type=str(n % 2))) for n in range(N)])),
    Call("append_frames", 1, lambda g: g.engine.append_frame(g.streaming.handle, NewFrame(payload=b"x"))),
    Call("append_frames", 64, lambda g: g.engine.append_frame(
        g.streaming.handle, NewFrame(payload=b"{}", mode=DurableSummary()))),
    Call("append_frames", 1, lambda g: g.engine.append_frame(
        g.streaming.handle, NewFrame(payload=b"x", mode=BestEffortLive(ttl=HOUR)))),
    Call("read_streams", 100, lambda g: g.engine.read_stream(g.streaming.execution_id)),
    Call("read_streams", N, lambda g: g.engine.read_streams([(one, None, START) for one in ids(g.held)])),
    Call("read_last_frames", 5, lambda g: g.engine.read_last_frames([g.streaming.execution_id])),
    Call("read_last_frames", N, lambda g: g.engine.read_last_frames(ids(g.held))),
    Call("read_stream_summary", 64, lambda g: g.engine.read_summary(g.streaming.execution_id)),
    Call("count_emitted", 3 * N, lambda g: g.engine.count_emitted(g.streaming.execution_id, 0)),
    Call("read_started", N, lambda g: g.engine.read_started(ids(g.held))),
    Call("submit_child", 1, lambda g: g.engine.submit_child(
        g.stepped.handle, "child", 0, NewExecution(execution_kind="child"))),
    # children
    Call("submit_child_flow", N, lambda g: g.engine.submit_child_flow(
        g.stepped.handle, "flow", 0, [node(f"n{n}") for n in range(N)], flow_id=FlowId(mint_uuid()), seed=mint_uuid())),
    Call("list_children", N, lambda g: g.engine.list_children(g.family.execution_id)),
    Call("list_children", 5, lambda g: g.engine.list_children(g.family.execution_id, limit=5)),
    Call("list_children", N, lambda g: g.engine.list_children(g.family.execution_id, deep=True)),
    Call("cancel", 1, lambda g: g.engine.cancel(g.family.handle, "enough")),
    Call("cancel_children", N, lambda g: g.engine.cancel_children(limit=N), family_cancelled),
    Call("run_timers", N, lambda g: g.engine.run_timers("retention"), offspring_ended),
    Call("replay", N, lambda g: g.engine.replay_execution(g.family.execution_id), offspring_cancelled),
    Call("find", N, lambda g: g.engine.find_executions(parent_id=g.family.execution_id, limit=N)),
    # outcomes
    Call("watch", N, lambda g: g.engine.watch(g.waiting, HOUR)),
    Call("unwatch", N, lambda g: g.engine.unwatch(g.waiting), lambda g: g.engine.watch(g.waiting, HOUR)),
    Call("read_outcomes", N, lambda g: g.engine.read_outcomes(ids(g.done))),
    # waits
    Call("create_waitpoint", 200, lambda g: g.engine.create_waitpoint(g.crowd.handle, "new", HOUR)),
    Call("close_waitpoint", 1, lambda g: g.engine.close_waitpoint(g.buffered.handle, g.buffer[0])),
    Call("expire_waitpoint", 1, lambda g: g.engine.expire_waitpoint(g.buffered.execution_id, g.buffer[0])),
    Call("list_pending_waitpoints", 200, lambda g: g.engine.list_pending_waitpoints(g.crowd.execution_id)),
    Call("read_waitpoint_token", 1, lambda g: g.engine.read_waitpoint_token(g.buffered.execution_id, g.buffer[0])),
    Call("probe_waitpoint", 1, lambda g: g.engine.probe_waitpoint(
        g.buffered.execution_id, g.buffer[0], g.tokens[g.buffer[0]])),
    Call("suspend", 3 * N, suspend_on_buffer),
    Call("suspend", 3 * N, suspend_satisfied),
    Call("suspend", 2 * 200, lambda g: g.engine.suspend_on(
        g.crowd.handle, g.crowd_points, any_of(*(f"k{n}" for n in range(200)), n=100))),
    Call("resume_execution", 1, lambda g: g.engine.resume_execution(g.counting.execution_id)),
    Call("expire_suspension", 1, lambda g: g.engine.expire_suspension(g.counting.execution_id), an_hour_later),
    Call("read_suspension", 1, lambda g: g.engine.read_suspension(g.counting.execution_id)),
    Call("list_suspended", 100, lambda g: g.engine.list_suspended(home(g.counting.execution_id))),
    Call("deliver_signal", 1, lambda g: g.send(g.buffered, g.buffer[0])),
    Call("deliver_signal", 1, lambda g: g.send(g.buffered, g.buffer[0], idempotency_key="new")),
    Call("deliver_signal", 1, lambda g: g.send(g.buffered, g.buffer[0], idempotency_key="key 7")),
    Call("deliver_signal", 1, lambda g: g.send(g.counting, g.count_points[0])),
    Call("deliver_signal", 1, lambda g: g.send(g.counting, g.count_points[0], source_identity="sender 7")),
    Call("deliver_signal", 1, lambda g: g.send(g.counting, g.count_points[1], source_identity="sender 7")),
    Call("deliver_signal", 3 * N, lambda g: g.send(g.task, g.task_points[0]), task_suspended),
    Call("deliver_signal_as_operator", 1, lambda g: g.engine.deliver_approval_signal(
        g.buffered.execution_id, "default", g.buffer[0], signal_name="go", idempotency_suffix="1")),
    Call("signal_by_key", 1, lambda g: g.engine.signal_execution(
        g.buffered.execution_id, "k", signal_name="go", source_type="webhook")),
    Call("signal_by_key", 200, lambda g: g.engine.signal_execution(
        g.crowd.execution_id, "k7", signal_name="go", source_type="webhook")),
    Call("observe_signals", 3 * N, lambda g: g.engine.observe_signals(g.buffered.handle), suspend_satisfied),
    Call("read_signals", 100, lambda g: g.engine.read_signals(g.buffered.execution_id, after=N)),
    Call("park", N, lambda g: g.engine.park(g.parent.handle, ends_of=g.children)),
    Call("park", 200, lambda g: g.engine.park(g.crowd.handle, signals_on=dict.fromkeys(g.crowd_points[1:], 0))),
    Call("open_wait", 200, lambda g: g.engine.open_wait(g.crowd.handle, "wait", 0, ["a", "b"], HOUR)),
    Call("settle_wait", 3 * N, task_suspended),
    Call("settle_wait", 3 * N, lambda g: g.engine.settle_wait(g.task.handle, "wait", 0, from_sources(2 * N, "k"))),
    Call("refuse_signals", 3 * N, refused, answered),
    Call("list_waits", 1000, lambda g: g.engine.list_waits(limit=1000)),
    Call("list_waits", 5, lambda g: g.engine.list_waits(limit=5)),
    # keys
    Call("seed_secret", 1, lambda g: g.engine.seed_waitpoint_hmac_secret("k1", "00" * 32)),
    Call("rotate_secret", 1, lambda g: g.engine.rotate_waitpoint_hmac_secret_all("k2", "00" * 32)),
    Call("list_kids", 1, lambda g: g.engine.list_waitpoint_hmac_kids()),
    # flows
    Call("grow_flow", N, lambda g: more(g)),
    Call("grow_flow", 2 * N, lambda g: g.flow()),
    Call("create_flow", 1, lambda g: g.engine.create_flow()),
    Call("add_to_flow", N, lambda g: g.engine.add_executions_to_flow(g.loose.flow_id, g.strangers)),
    Call("delete_flow", 2 * N, lambda g: g.engine.delete_flow(g.wide.flow_id), flow_ended),
    Call("describe_flow", 2 * N, lambda g: g.engine.describe_flow(g.wide.flow_id)),
    Call("read_members", N, lambda g: g.engine.list_flow_members(g.wide.flow_id)),
    Call("read_members", 5, lambda g: g.engine.list_flow_members(g.wide.flow_id, limit=5)),
    Call("flow_progress", N, lambda g: g.engine.flow_progress(g.wide.flow_id)),
    Call("list_flows", 100, lambda g: g.engine.list_flows(home(g.wide.flow_id))),
    Call("list_flows", 5, lambda g: g.engine.find_flows(limit=5)),
    Call("list_flows", 5, lambda g: g.engine.find_flows(namespace="space", limit=5)),
    Call("list_flows", 3 * N, lambda g: g.engine.find_flows(flow_kind="nothing")),
    Call("set_flow_tags", 1, lambda g: g.engine.set_flow_tags(g.wide.flow_id, {"a.b": "c"})),
    Call("read_flow_tags", 1, lambda g: g.engine.get_flow_tag(g.wide.flow_id, "a.b")),
    Call("project_flows", N, lambda g: g.engine.project_flow_summary(g.wide.flow_id)),
    Call("project_touched", 4 * N, lambda g: g.engine.project_flow_summaries(), touched),
    Call("read_summary", 1, lambda g: g.engine.read_flow_summary(g.wide.flow_id), summed),
    Call("read_summary", N, lambda g: g.engine.read_flow_summary(g.wide.flow_id, now=True)),
    Call("flow_eligibility", 1, lambda g: g.engine.evaluate_flow_eligibility(g.wide.nodes["z"])),
    # edges
    Call("stage_edges", N, edges_staged),
    Call("stage_edges", N, lambda g: g.engine.stage_dependency_edge(
        g.chain.flow_id, edge_id=mint_uuid(), upstream_execution_id=g.chain.nodes["c0"],
        downstream_execution_id=g.chain.nodes[f"c{N - 1}"], expected_graph_revision=2 * N - 1)),
    Call("apply_edge", N, lambda g: g.engine.apply_dependency_to_child(
        g.loose.flow_id, edge_id=EDGE, upstream_execution_id=g.members[1], downstream_execution_id=g.members[2]),
        one_edge_staged),
    Call("set_group_policy", 1, lambda g: g.engine.set_edge_group_policy(g.loose.flow_id, g.members[0], AnyOf())),
    Call("read_edges", N, lambda g: g.engine.list_edges(g.wide.flow_id, incoming=g.wide.nodes["z"])),
    Call("read_edges", N, lambda g: g.engine.list_edges(g.wide.flow_id, outgoing=g.wide.nodes["a"])),
    Call("read_edges", 5, lambda g: g.engine.list_edges(g.wide.flow_id, limit=5)),
    Call("read_edges", 5, lambda g: g.engine.list_edges(g.wide.flow_id, after=EDGE, limit=5)),
    Call("read_edges", 1, lambda g: g.engine.describe_edge(g.wide.flow_id, EDGE)),
    Call("resolve_dependency", N, resolve, found_edge),
    Call("promote_blocked", 1, lambda g: g.engine._fetch(statements.PROMOTE_BLOCKED, *g.engine._at(g.wide.nodes["z"]))),
    Call("reconcile_edges", 2 * N, lambda g: g.engine.reconcile_edges(), first_ended),
    # cascades, sibling cancels, cancelled flows
    Call("dispatch_cascades", N, lambda g: g.engine.dispatch_cascades(edges=N), first_ended),
    Call("dispatch_cascades", N, lambda g: g.engine.dispatch_cascades(limit=N, edges=N), middle_ended),
    Call("cascade_pending", 1, lambda g: g.engine._fetch(statements.CASCADE_PENDING, 1), middle_ended),
    Call("cancel_siblings", N, lambda g: g.engine.cancel_siblings(limit=N), one_chosen),
    Call("drain_siblings", N, lambda g: g.engine.drain_sibling_cancel_group(g.choice.flow_id, g.choice.nodes["y"]),
         one_chosen),
    Call("reconcile_siblings", N, lambda g: g.engine.reconcile_sibling_cancel_group(
        g.choice.flow_id, g.choice.nodes["y"]), one_chosen),
    Call("queued_siblings", N, lambda g: g.engine.list_sibling_cancels(), one_chosen),
    Call("cancel_flow_header", N, lambda g: g.engine.cancel_flow_header(g.wide.flow_id)),
    Call("cancel_members", N, lambda g: g.engine.reconcile_cancellations(members=N), flow_cancelled),
    Call("ack_cancel_member", 1, lambda g: g.engine.ack_cancel_member(g.wide.flow_id, g.wide.nodes["m7"]),
         flow_cancelled),
    Call("read_cancel_backlog", N, lambda g: g.engine.read_cancel_backlog(g.wide.flow_id), flow_cancelled),
    Call("due_cancellations", 1, lambda g: g.engine._fetch(statements.DUE_CANCELLATIONS, 10, None), flow_cancelled),
    # reads
    Call("read_executions", 1, lambda g: g.engine.read_execution(g.buffered.execution_id)),
    Call("read_executions", N, lambda g: g.engine.read_executions(ids(g.done))),
    Call("read_result", 1, lambda g: g.engine.read_result(g.done[3].execution_id)),
    Call("read_payload", 1, lambda g: g.engine.read_execution_context(g.done[3].execution_id)),
    Call("list_attempts", 1, lambda g: g.engine.list_attempts(g.done[3].execution_id)),
    Call("list_attempts", 1, lambda g: g.engine.list_attempts(g.done[3].execution_id, after=0, limit=5)),
    Call("list_partition", 50, lambda g: g.engine.list_executions(home(g.wide.flow_id))),
    Call("find", 100, lambda g: g.engine.find_executions()),  # the newest of each of a thousand kinds
    Call("find", 100, lambda g: g.engine.find_executions(lane_ids=["far"])),
    Call("find", 50, lambda g: g.engine.find_executions(kinds=["done"])),
    Call("find", 50, lambda g: g.engine.find_executions(namespace="space")),
    Call("find", 50, lambda g: g.engine.find_executions(tag=("a.b", "c"))),
    Call("find", 50, lambda g: g.engine.find_executions(states=["cancelled"])),
    Call("find", 50, lambda g: g.engine.find_executions(states=["cancelled"], order_by="ended")),
    Call("find", 50, lambda g: g.engine.find_executions(stopped=True)),
    Call("find", 50, lambda g: g.engine.find_executions(flow_id=g.wide.flow_id)),
    Call("find_ids", 50, lambda g: g.engine.find_id(str(g.done[3].execution_id)[-8:])),
    Call("find_ids", 256, lambda g: g.engine.find_id(str(g.done[3].execution_id))),
    # limits
    Call("create_executions", N, lambda g: g.some(
        "new", policy=lambda n: ExecutionPolicy(budget_ids=(mint_uuid(),), quota_policy_id=g.keyed),  # type: ignore[arg-type]
        tags=lambda n: {"t": str(n)})),
    Call("create_executions", 2 * N, lambda g: g.some("bound", tags=lambda n: {"t": str(n)})),
    Call("list_bindings", 10, lambda g: g.engine.list_bindings(limit=10)),
    # Binding, releasing and the duty for limits read every kind.
    Call("bind_limit", 10, lambda g: g.engine.bind_limit(g.full, Bind(kind="other"))),
    Call("unbind_limit", 10, lambda g: g.engine.unbind_limit(g.keyed, Bind(kind="bound", tag=("t", "1")))),
    Call("claim", N, lambda g: g.claimed("room")),
    Call("claim", 2 * N, lambda g: g.claimed("spread")),  # N heads are locked too
    Call("claim", 1000, lambda g: g.engine.claim_many(limit=10, kinds=["full"], **WORKER)),
    Call("complete", N, lambda g: g.engine.complete_many([one.handle for one in g.running[:N]])),
    Call("complete", 1, lambda g: g.engine.complete(g.owner.handle)),
    Call("delay", 1, lambda g: g.engine.delay(g.owner.handle, HOUR)),
    Call("claim_as_operator", 1, lambda g: g.engine.issue_grant_and_claim(g.shut[0])),
    Call("create_quota_policy", 1, lambda g: g.engine.create_quota_policy(name="new")),
    Call("update_quota_policy", N, lambda g: g.engine.update_quota_policy(g.full, max_concurrent=N)),
    Call("list_quota_policies", 4 * N, lambda g: g.engine.list_quota_policies()),
    Call("list_quota_keys", 3 * N, lambda g: g.engine.list_quota_keys(g.full)),
    Call("check_admission", 1, lambda g: g.engine.check_admission(mint_uuid(), g.waiting[0], concurrency_cap=1)),  # type: ignore[arg-type]
    Call("release_admission", 1, lambda g: g.engine.release_admission(g.full, g.owner.execution_id)),
    Call("unblock_limited", 1, lambda g: g.engine.unblock_limited(), an_hour_later),
    Call("unblock_limited", 10, lambda g: g.engine.unblock_limited(after=(UUID(int=0), ""))),
    Call("reconcile_quotas", 4 * N, lambda g: g.engine.reconcile_quotas(), an_hour_later),
    Call("find_limits", N, lambda g: g.engine.find_limits(
        budgets=[f"other {n}" for n in range(N)], quotas=[f"q{n}" for n in range(N)])),
    Call("list_held", 100, lambda g: g.engine.list_held(g.full, limit=100)),
    Call("read_held", 1, lambda g: g.engine.read_held(g.shut[0])),
    Call("count_denials", 1, lambda g: g.engine.count_denials()),
    Call("read_denials", 1, lambda g: g.engine.read_denials()),
    Call("count_held", 100, lambda g: g.engine.count_held(limit=100)),
    # For people: it reads the limit sets.
    Call("find_unreported", 2 * N, lambda g: g.engine.find_unreported_budgets(limit=100)),
    Call("read_declared_limits", N, lambda g: g.engine.read_declared_limits(
        [f"budget {n}" for n in range(N)]), declared),
    Call("note_declared_limits", N, lambda g: g.engine.note_declared_limits(
        {f"budget {n}": "d" for n in range(N)}), declared),
    # budgets
    Call("use_budgets", 1, lambda g: g.engine.report_usage(g.spending[0].handle, {"t": 1})),
    Call("use_budgets", N, lambda g: g.engine.use_budgets(
        [Report(authority=one.handle, usage=Usage(custom={"t": 1}, dedup_key=f"new {n}"))
         for n, one in enumerate(g.spending)])),
    Call("use_budgets", N, lambda g: g.engine.use_budgets(
        [Report(authority=one.handle, usage=Usage(custom={"t": 1}), place=("new", 0)) for one in g.spending])),
    Call("use_budgets", N, lambda g: g.engine.use_budgets(
        [Report(authority=one.handle, usage=Usage(custom={"t": 1}), place=("first", 0)) for one in g.spending])),
    Call("use_budgets", N, lambda g: g.engine.use_budgets(
        [Settle(authority=one.handle, reservation_id=held, usage=Usage(custom={"t": 1}))
         for one, held in zip(g.spending, g.reserved, strict=True)])),
    Call("use_budgets", N, lambda g: g.engine.use_budgets(
        [Reserve(authority=one.handle, usage=Usage(custom={"t": 1}), place=("s", 0)) for one in g.spending])),
    Call("complete", N, lambda g: g.engine.complete_many([one.handle for one in g.spending])),
    Call("pause_for_budget", 1, lambda g: g.engine.pause_for_budget(g.spending[0].handle, {"t": 2 * 10**9})),
    Call("report_usage_admin", 1, lambda g: g.engine.report_usage_admin(
        g.spent, dimensions=["t"], deltas=[1], dedup_key="one")),
    Call("record_spend", 1, lambda g: g.engine.record_spend(g.spent, g.waiting[0], {"t": 1})),
    Call("release_budget", 1, lambda g: g.engine.release_budget(g.spent, g.waiting[0])),
    Call("create_budget", 1, lambda g: g.engine.create_budget(name="new")),
    Call("update_budget", 1, lambda g: g.engine.update_budget(g.spent, raise_by={"t": 1})),
    Call("update_budget", N, lambda g: g.engine.update_budget(g.exhausted, raise_by={"t": 1})),
    Call("reset_budget", N, lambda g: g.engine.reset_budget(g.exhausted)),
    Call("reset_due_budgets", 1, lambda g: g.engine.reset_due_budgets()),
    Call("collect_ended", N, lambda g: g.engine.collect_reservations()),
    Call("collect_ended", N, lambda g: g.engine.collect_reservations(marked=True), with_marked),
    Call("reconcile_budgets", 100, lambda g: g.engine.reconcile_budget_counters()),
    Call("read_budgets", 1, lambda g: g.engine.get_budget_status(g.spent)),
    Call("find_budgets", 1, lambda g: g.engine.find_budgets(["spent"])),
    Call("list_budgets", 10, lambda g: g.engine.list_budgets(prefix="other", limit=10)),
    Call("list_spend", 10, lambda g: g.engine.list_spend(g.spent, limit=10)),
    Call("read_usage", 1, lambda g: g.engine.read_usage(g.spending[0].execution_id)),
    Call("read_usage", 1, lambda g: g.engine.read_usage(g.spending[0].execution_id, limit=5)),
    # limits by name, and what they hold
    Call("find_limits", 2, lambda g: g.engine.find_limits(["spent"], ["full"])),
    Call("list_held", 10, lambda g: g.engine.list_held(g.full, limit=10)),
    Call("read_held", 1, lambda g: g.engine.read_held(g.waiting[0])),
    Call("count_held", 4 * N, lambda g: g.engine.count_held()),
    Call("find_unreported", 1000, lambda g: g.engine.find_unreported_budgets()),
    Call("read_declared_limits", 1, lambda g: g.engine.read_declared_limits(["budget spent"])),
    Call("note_declared_limits", 1, lambda g: g.engine.note_declared_limits({"budget spent": "1"})),
    # lanes
    Call("register_lanes", 1, lambda g: g.engine.prepare()),
    Call("list_lanes", 100, lambda g: g.engine.list_lanes()),
    Call("set_lane_state", 1, lambda g: g.engine.set_lane_state("other", "paused")),
    # at most so many of each kind of work, state and reason
    Call("read_gauges", 60 * 20, lambda g: g.engine.read_gauges(most=20)),
    Call("lane_stats", 12 * N, lambda g: g.engine.lane_stats()),
    # workers
    Call("register_worker", 1, lambda g: g.engine.register_worker("pool", "new", lanes=["other"], liveness_ttl=HOUR)),
    Call("register_worker", 1, lambda g: g.engine.register_worker(
        "pool", "worker-3", namespace="space", lanes=["other"], liveness_ttl=HOUR), an_hour_later),
    Call("heartbeat_worker", 1, lambda g: g.engine.heartbeat_worker("worker-2")),
    Call("leave_registry", 1, lambda g: g.engine.leave_registry("worker-3", reason="stopped")),
    Call("mark_worker_dead", 1, lambda g: g.engine.mark_worker_dead("worker-2", reason="gone")),
    Call("list_workers", 100, lambda g: g.engine.list_workers("space", after="worker-5", limit=100)),
    Call("list_workers", 100, lambda g: g.engine.list_all_workers(after=("", "worker-5"), limit=100)),
    Call("list_worker_events", 100, lambda g: g.engine.list_worker_events("worker-2")),
    Call("find_unserved", 3 * N, lambda g: g.engine.find_unserved(g.waiting)),
    Call("list_uncovered", N, lambda g: g.engine.list_uncovered()),
    Call("judge_all", 3 * N, lambda g: g.engine.judge_routes()),
    # For people: it reads what has not ended, once a task has a version.
    Call("list_versions", 10 * N, lambda g: g.engine.list_versions()),
    Call("sweep_workers", 3 * N, lambda g: g.engine.sweep_workers(), an_hour_later),
    Call("trim_worker_events", N, lambda g: g.engine.trim_worker_events(limit=N), days_later),
    Call("list_leads", 100, lambda g: g.engine.list_leaders()),
    # schedules
    Call("put_schedule", 1, lambda g: g.engine.put_schedule("new", kind="k", timing={}, next_at=None)),
    Call("list_schedules", 100, lambda g: g.engine.list_schedules()),
    Call("set_schedule_paused", 1, lambda g: g.engine.pause_schedule("s7")),
    Call("delete_schedule", 1, lambda g: g.engine.delete_schedule("s7")),
    Call("due_schedules", 100, lambda g: g.engine.due_schedules()),
    Call("next_schedule", 1, lambda g: g.engine.until_next_schedule()),
    Call("fire_schedule", N, lambda g: g.fire(later_items(N))),
    Call("advance_schedule", 1, lambda g: g.fire([])),
    # events
    Call("read_events", 256, lambda g: g.engine.read_events(after=EventCursor(2000))),
    Call("seek_events", 100, lambda g: g.engine.seek_events(datetime.now(UTC))),
    Call("sleep_for_events", 1, lambda g: g.engine.sleep_for_events(1.0, None)),
    Call("register_consumer", 10, lambda g: g.engine.register_consumer("new")),
    *(
        Call(name, 2, call, lambda g: g.engine.register_consumer("c", start=EventCursor(2000)))
        for name, call in {
            "take_consumer": lambda g: g.engine._fetch(
                statements.TAKE_CONSUMER, "c", g.engine.instance, 1000, "host", 1
            ),
            "move_consumer": lambda g: g.engine._fetch(
                statements.MOVE_CONSUMER, "c", g.engine.instance, 2100, 0, 100
            ),
            "fail_consumer": lambda g: g.engine.fail_consumer("c", "x"),
            "leave_consumer": lambda g: g.engine.leave_consumer("c"),
            "set_consumer": lambda g: g.engine.set_consumer("c", EventCursor(2100)),
            "delete_consumer": lambda g: g.engine.delete_consumer("c"),
        }.items()
    ),
    Call(
        "list_consumers",
        11 * 1000,
        lambda g: g.engine.list_consumers(),
        lambda g: g.engine.register_consumer("c", start=EventCursor(2000)),
    ),
    Call("list_events", 10 * N, lambda g: g.engine.list_events(g.done[3].execution_id)),
    Call("count_events", 10 * N, lambda g: g.engine.count_events(EventCursor(2000))),
    # timers and the audit
    Call("run_one", 1, lambda g: g.engine.mark_lease_expired_if_due(g.short[3].execution_id), an_hour_later),
    Call("run_one", 1, lambda g: g.engine.promote_delayed(g.delayed[3]), an_hour_later),
    *(
        Call("run_timers", N, timers(kind), days_later if kind == T.RETENTION else an_hour_later)
        for kind in T
    ),
    Call("sweep", N, lambda g: g.engine.sweep(), days_later),
    # A hook is a submission of its own.
    Call("submit_hooks", N, lambda g: g.engine.submit_hooks(limit=N), with_hooks),
    Call("next_due", 1, lambda g: g.engine.next_due()),
    Call("look_for_due", 1, lambda g: g.engine.look_for_due(dict.fromkeys([*T, *QUEUES]), at_most=HOUR), an_hour_later),
    Call("begin_epoch", 1, lambda g: g.engine._fetch("select flowfabric.begin_epoch()")),
    Call("take_lead", 2, lambda g: g.engine.take_lead([DUTIES, CASCADES], HOUR)),
    Call("leave_lead", 1, lambda g: g.engine.leave_lead()),
    # Every rule reads each of the 33 N executions of the ground; there are a hundred rules, and what undone calls left.
    Call("audit", 78 * N, lambda g: g.engine.audit(events=True)),
    Call("audit_sample", 3 * N, lambda g: g.engine.audit_sample(home(g.wide.flow_id))),
    Call("repair_floors", 100, lambda g: g.engine.repair_floors()),
    # the server
    Call("create_api_key", 1, lambda g: g.engine.create_api_key("new", ["read"])),
    Call("read_api_key", 1, lambda g: g.engine.read_api_key(a_key_id(3))),
    Call("list_api_keys", 100, lambda g: g.engine.list_api_keys()),
    Call("revoke_api_key", 1, lambda g: g.engine.revoke_api_key(a_key_id(3))),
    Call("rotate_api_key", 1, lambda g: g.engine.rotate_api_key(a_key_id(3))),
    Call("note_api_key_use", 1, lambda g: g.engine.note_api_key_use(a_key_id(3))),
    Call("write_operator_audit", 1, lambda g: g.engine.write_operator_audit(Actor(name="a", operation="o"))),
    Call("list_operator_audit", 100, lambda g: g.engine.list_operator_audit()),
    Call("list_operator_audit", 3 * N, lambda g: g.engine.list_operator_audit(AuditFilter(actor="another"))),
    Call("begin_answer", 1, lambda g: g.engine.begin_answer(an_answer("key 3"), b"r")),
    Call("begin_answer", 1, lambda g: g.engine.begin_answer(an_answer("new"), b"r")),
    Call("finish_answer", 1, lambda g: g.engine.finish_answer(an_answer("new"), status=200),
         lambda g: g.engine.begin_answer(an_answer("new"), b"r")),
    Call("forget_answer", 1, lambda g: g.engine.forget_answer(an_answer("new")),
         lambda g: g.engine.begin_answer(an_answer("new"), b"r")),
    Call("in_namespaces", N, lambda g: g.engine.in_namespaces(["space"], g.waiting)),
    Call("create_bulk", 1, lambda g: g.engine.create_bulk("cancel", ExecutionFilter(kinds=("waiting",)), actor="a")),
    Call("list_bulk", 1, lambda g: g.engine.read_bulk(BULK)),
    Call("list_bulk", 1, lambda g: g.engine.list_running_bulk(limit=1)),
    Call("run_bulk", 3 * N, lambda g: g.engine.run_bulk(BULK, limit=N)),
    Call("run_bulk", 3 * N, lambda g: g.engine.run_bulk(REPLAYS, limit=N), replays),
    Call("stop_bulk", 1, lambda g: g.engine.stop_bulk(BULK)),
    Call("list_failures", N, lambda g: g.engine.list_failures(states=["cancelled", "failed"], most=N)),
    Call("list_failures", 5, lambda g: g.engine.list_failures(states=["cancelled", "failed"], most=5)),
    # lists with filters, and pages in the middle
    Call("find", N, lambda g: g.engine.find_executions(namespace="space", kinds=["waiting"], tag=("a.b", "c"))),
    Call("find", 50 * N, lambda g: g.engine.find_executions(namespace="none", lane_ids=["far"])),
    Call("find", 2 * N, lambda g: g.engine.find_executions(states=["cancelled"], namespace="", kinds=["cancelled"])),
    Call("find", 2 * N, lambda g: g.engine.find_executions(flow_id=g.wide.flow_id, states=["failed"])),
    Call("list_failures", N, lambda g: g.engine.list_failures(
        states=["cancelled"], namespaces=["", "space"], lane_ids=["default"], kinds=["cancelled"], most=N)),
    Call("list_failures", 3 * N, lambda g: g.engine.list_failures(states=["cancelled"], tag=("a.b", "none"), most=N)),
    Call("list_held", N, lambda g: g.engine.list_held(g.full, kinds=["full"], namespace="", limit=N)),
    Call("list_held", 2 * N, lambda g: g.engine.list_held(g.full, tag=("a.b", "none"), limit=10)),
    Call("list_held", 2 * N, lambda g: g.engine.list_held(g.full, flow_id=g.wide.flow_id, limit=10)),
    Call("list_held", 2 * N, lambda g: g.engine.list_held(g.full, parent_id=g.family.execution_id, limit=10)),
    Call("list_budgets", 10, lambda g: g.engine.list_budgets(limit=10)),
    Call("list_budgets", N, lambda g: g.engine.list_budgets(exhausted=True, limit=10)),
    Call("list_budgets", N, lambda g: g.engine.list_budgets(scope_type="a", scope_id="b", limit=10)),
    Call("list_budgets", 10, lambda g: g.engine.list_budgets(owner_id=g.waiting[3], limit=10)),
    Call("list_spend", 1, lambda g: g.engine.list_spend(g.spent, execution_id=g.spending[3].execution_id, limit=10)),
    Call("list_quota_keys", 10, lambda g: g.engine.list_quota_keys(g.keyed, limit=10)),
    Call("list_quota_policies", 4 * N, lambda g: g.engine.list_quota_policies(name_prefix="ro", limit=10)),
    Call("list_bindings", 10, lambda g: g.engine.list_bindings(limit_id=g.keyed, limit=10)),
    Call("list_operator_audit", 10, lambda g: g.engine.list_operator_audit(before=N, limit=10)),
    Call("list_operator_audit", 3 * N, lambda g: g.engine.list_operator_audit(
        AuditFilter(operation="none", outcome="ok"), limit=10)),
    Call("list_api_keys", 10, lambda g: g.engine.list_api_keys(usable=True, limit=10)),
    Call("list_waits", 3 * N, lambda g: g.engine.list_waits(namespace="none", limit=10)),
    Call("list_waits", 3 * N, lambda g: g.engine.list_waits(lane_id="none", waitpoint_key="k", limit=10)),
    Call("list_schedules", 3 * N, lambda g: g.engine.list_schedules(namespace="none", limit=10)),
    Call("list_expired_leases", N, lambda g: g.engine.list_expired_leases(namespace="", limit=10), an_hour_later),
    Call("lane_stats", 12 * N, lambda g: g.engine.lane_stats(["far"])),
    Call("read_steps", N, lambda g: g.engine.read_steps(ids(g.held), all_generations=True)),
    Call("read_usage", N, lambda g: g.engine.read_usage(g.family.execution_id)),
    Call("read_members", N, lambda g: g.engine.list_flow_members(g.wide.flow_id, results=True), flow_ended),
    Call("list_events", 10 * N, lambda g: g.engine.list_events(g.done[3].execution_id, after=EventCursor(1), limit=10)),
    Call("read_events", 25 * N, lambda g: g.engine.read_events(filter=EventFilter(kind="none"))),
    Call("read_events", 25 * N, lambda g: g.engine.read_events(
        filter=EventFilter(execution_id=g.done[3].execution_id))),
    # rounds of duties that begin in the middle
    Call("unblock_limited", 10, lambda g: g.engine.unblock_limited(after=(g.full, ""))),
    Call("unblock_limited", N, lambda g: g.engine.unblock_limited(
        after=(UUID(int=0), ""), filter=ScannerFilter(namespace="none"))),
    Call("reconcile_quotas", N, lambda g: g.engine.reconcile_quotas(after=QuotaPlace(g.keyed, "250"), limit=100)),
    Call("reconcile_budgets", 100, lambda g: g.engine.reconcile_budget_counters(
        after=g.spent, spent_after=g.waiting[3], limit=100)),
    Call("reconcile_edges", N, lambda g: g.engine.reconcile_edges(
        EdgePlace(home(g.wide.flow_id), g.wide.flow_id, g.wide.nodes["m7"]), limit=100), first_ended),
    Call("reconcile_edges", N, lambda g: g.engine.reconcile_edges(
        limit=100, filter=ScannerFilter(instance_tag=("a.b", "none"))), first_ended),
    Call("cancel_siblings", N, lambda g: g.engine.cancel_siblings(g.choice.flow_id, g.choice.nodes["y"]), one_chosen),
    Call("cancel_children", N, lambda g: g.engine.cancel_children(g.family.execution_id), family_cancelled),
    Call("run_timers", N, lambda g: g.engine.run_timers(
        T.LEASE, filter=ScannerFilter(namespace="none")), an_hour_later),
    Call("dispatch_cascades", N, lambda g: g.engine.dispatch_cascades(filter=ScannerFilter(namespace="none")),
         middle_ended),
    # the deployment
    Call("deployment_info", 1, lambda g: g.engine._fetch(statements.DEPLOYMENT_INFO)),
    Call("server_time_ms", 1, lambda g: g.engine.server_time_ms()),
    Call("server_now", 1, lambda g: g.engine._fetch("select flowfabric.server_now()")),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ground(server: str) -> AsyncIterator[Ground]:
    async with filled(server) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def turned(server: str) -> AsyncIterator[Ground]:
    """The same with new primary keys: of two indexes that seem to cost the same, the planner takes another."""
    async with filled(server) as made:
        keys = await made.sql.fetch(PRIMARY_KEYS)
        assert keys
        for key in keys:
            await made.sql.execute(key["turn"])
        yield made


@asynccontextmanager
async def filled(server: str) -> AsyncIterator[Ground]:
    async with fresh_database(server) as dsn, CountingEngine.open(dsn) as engine:
        made = Ground(engine, dsn)
        await made.fill()
        await made.sql.execute("select setseed(0.5)")
        yield made


async def test_what_fills_the_database_is_sound(ground: Ground) -> None:
    assert await ground.engine.audit(events=False) == []


async def test_every_function_is_called(ground: Ground) -> None:
    found = await ground.sql.fetch(
        "select distinct proname::text as name from pg_proc"
        " where pronamespace = 'flowfabric'::regnamespace and prosecdef"
    )
    assert {row["name"] for row in found} == {call.function for call in CALLS}


async def test_the_catalogs_that_a_connection_reads_are_not_pages_of_the_call(ground: Ground) -> None:
    """A connection that plans the call for the first time counts as many as one that has planned it."""
    found = []
    async with CountingEngine.open(ground.dsn) as engine:
        for _ in range(2):
            async with engine.undone():
                await engine.count()
                await engine.pause_for_budget(ground.spending[0].handle, {"t": 2 * 10**9})
                found.append(await engine.pages())
    assert 50 < found[0] <= found[1] + 50, found


def sampled() -> dict[str, list[Call]]:
    """The calls to make with each of the statistics: by turns with one of them and with the two others; or with all."""
    found: dict[str, list[Call]] = {name: [] for name in STATISTICS}
    for number, call in enumerate(CALLS):
        one = list(STATISTICS)[number // 2 % len(STATISTICS)]
        for name, calls in found.items():
            if sampling.is_full() or (name == one) == (number % 2 == 0):
                calls.append(call)
    return found


@pytest.mark.both_servers
@pytest.mark.parametrize("statistics", STATISTICS)
async def test_a_call_handles_rows_in_proportion_to_its_input(ground: Ground, statistics: str) -> None:
    await in_proportion(ground, statistics)


@pytest.mark.parametrize("statistics", STATISTICS)
async def test_no_call_depends_on_which_of_two_indexes_is_older(turned: Ground, statistics: str) -> None:
    await in_proportion(turned, statistics)


async def in_proportion(ground: Ground, statistics: str) -> None:
    await ground.sql.execute("analyze")
    await ground.sql.execute(STATISTICS[statistics])
    too_many: list[str] = []
    for call in sampled()[statistics]:
        found = await too_much(ground, call)
        if found.keys() == {"pages"}:
            # Those of dead rows that undone calls left, which an index scan passes over: without them they must be few.
            # The statistics stay as they were.
            await ground.sql.execute("vacuum (index_cleanup on)")
            await ground.sql.execute(STATISTICS[statistics])
            found = await too_much(ground, call)
        too_many += found.values()
    assert not too_many, "\n".join(too_many)


async def too_much(ground: Ground, call: Call) -> dict[str, str]:
    """Make a call; returns what it handled more of than its input allows: rows, pages."""
    engine = ground.engine
    async with engine.undone():
        if call.before is not None:
            await call.before(ground)
        await engine.count()
        await call.call(ground)
        pages = await engine.pages()
    assert call.function in engine.called
    allowed = 150 * call.items + 500
    return {
        what: f"{call.function}: {found} {what} for {call.items} items, most in {engine.worst[0][1][:300]}"
        for what, found, most in (("rows", engine.handled, allowed), ("pages", pages, 2 * allowed))
        if found > most
    }


# Open suspensions in a partition, each since another moment.
OPEN = """
insert into flowfabric.suspension
    (partition, id, number, suspension_id, attempt_index, attempt_id, lease_id, lease_epoch, waitpoint_ids,
     waitpoint_keys, reason_code, requested_by, resume_condition, resume_policy, suspended_at, is_early)
select $1, gen_random_uuid(), 1, gen_random_uuid(), 0, gen_random_uuid(), gen_random_uuid(), 1, '{}', '{}',
       'waiting_for_signal', 'worker', '{}', '{}', flowfabric.now() - n * interval '1 s', false
from generate_series(1, 20000) n
"""


@pytest.mark.both_servers
@pytest.mark.parametrize("statistics", STATISTICS)
async def test_a_suspension_is_found_among_many_of_its_partition(ground: Ground, statistics: str) -> None:
    engine = ground.engine
    await ground.sql.execute("analyze")
    await ground.sql.execute(STATISTICS[statistics])
    read: dict[str, list[int]] = {}

    async def counted(name: str, call: Awaitable[Any]) -> None:
        await engine.count()
        await call
        read.setdefault(name, []).append(await engine.pages())

    for others in (False, True):
        for ends in ("deliver", "resume"):
            async with engine.undone():
                held, points = await ground.pending("alone", 0, "k")
                if others:
                    await ground.sql.execute(OPEN, home(held.execution_id))
                await counted("suspend", engine.suspend_on(held.handle, points, on("k")))
                await counted("expire", engine.expire_suspension(held.execution_id))
                if ends == "deliver":
                    await counted(ends, ground.send(held, points[0]))
                else:
                    await counted(ends, engine.resume_execution(held.execution_id))
    assert not [name for name, pages in read.items() if max(pages) > min(pages) + 50], read


MANY = 1_000_000
COUNTS = {
    "signals": count_signals(MANY, "k", "l"),
    "sources": from_sources(MANY, "k", "l"),
    "waitpoints": any_of("k", "l", n=2),
    "all of them": all_of(on("k"), count_signals(MANY, "k", name="go"), from_sources(MANY, "k"), any_of("k", "l", n=2)),
}


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("counted", COUNTS)
async def test_a_signal_to_an_open_count_reads_as_much_after_a_hundred_as_after_thousands(
    ground: Ground, counted: str, statistics: str
) -> None:
    engine = ground.engine
    await ground.sql.execute("analyze")
    await ground.sql.execute(STATISTICS[statistics])
    read: dict[tuple[str, str], list[tuple[int, int]]] = {}
    async with engine.undone():
        for recorded in (100, 2000):
            held, points = await ground.pending(f"{counted} {recorded}", recorded, "k", "l")
            await engine.suspend_on(held.handle, points, COUNTS[counted])
            await ground.send(held, points[0], signal_name="first")  # drops what is too much
            for sender in ("new", "sender 7"):
                for name in ("go", "other"):
                    await engine.count()
                    answer = await ground.send(held, points[0], source_identity=sender, signal_name=name)
                    assert answer.effect == "appended_to_waitpoint"
                    read.setdefault((sender, name), []).append((engine.handled, await engine.pages()))
    for (few, few_pages), (many, many_pages) in read.values():
        assert many <= few + 30, read  # one more signal is dropped
        assert many_pages <= few_pages + 50, read
