"""The engine and the model of flows run the same steps and must agree about everything after each one.

A history is a list of steps drawn by hypothesis; whom a step concerns is a number that is taken modulo what is there,
so that every list is a history. The clock only moves when a step moves it. See tests/flow_model.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid5

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric._postgres import rows
from flowfabric.errors import ExecutionNotActive, StateError
from flowfabric.values.attempt import Claimed, Completion
from flowfabric.values.conditions import on
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import (
    Added,
    Advanced,
    AlreadyApplied,
    AlreadyMember,
    Applied,
    Edge,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    NoOp,
)
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import FlowId, mint_uuid
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from flowfabric.values.lease import Handle, Operator
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.wait import Fresh
from tests import sampling
from tests.flow_model import BACKOFF, MAX_RETRIES, FlowModel, Group, Member, Refused, final_states
from tests.ids import home, id_in
from tests.sql.test_model import MS, START, World, ms, same
from tests.support import WORKER, CheckedEngine, claim_one, in_database

_T = TypeVar("_T")
SPACE = UUID("5f0c9c1e-6f0e-4c3a-9a53-8d6c6b0f6c11")
FLOW = FlowId(uuid5(SPACE, "flow"))
PARTITION = home(FLOW)
POLICY = ExecutionPolicy(
    retry_policy=ff.RetryPolicy(max_retries=MAX_RETRIES, backoff=ff.Fixed(timedelta(milliseconds=BACKOFF)))
)
FAST = ExecutionPolicy(retry_policy=ff.RetryPolicy(backoff=ff.Fixed(timedelta(milliseconds=1))))
DAY = timedelta(days=1)
POLICIES: list[EdgeGroupPolicy] = [
    AllOf(),
    AnyOf(),
    AnyOf(OnSatisfied.LET_RUN),
    Quorum(2),
    Quorum(2, OnSatisfied.LET_RUN),
    Quorum(3),
    AllSettled(),
]
MOST = 8  # executions in a history


def facts(policy: EdgeGroupPolicy) -> tuple[str, int | None, bool]:
    """A policy as the model has it: kind, k, and whether the rest is cancelled."""
    match policy:
        case AllOf():
            return "all_of", None, False
        case AnyOf(rest):
            return "any_of", 1, rest == OnSatisfied.CANCEL_REMAINING
        case Quorum(k, rest):
            return "quorum", k, rest == OnSatisfied.CANCEL_REMAINING
        case AllSettled():
            return "all_settled", None, False


def times_of(number: int) -> tuple[int | None, int | None]:
    """A delay and a deadline, or none, in milliseconds."""
    return (None, None, 5_000, 60_000)[number // 6 % 4], (None, None, 30_000, 120_000)[number // 16 % 4]


_STEPS: dict[str, int] = {}  # the steps by name, with their weights


def step(weight: int = 1) -> Callable[[_T], _T]:
    def register(method: _T) -> _T:
        _STEPS[method.__name__] = weight  # type: ignore[attr-defined]
        return method

    return register


class History:
    """One flow, in the engine and in the model."""

    def __init__(self, world: World, other: asyncpg.Connection[Any]) -> None:
        self.world = world
        self.engine = world.engine
        self.other = other
        self.model = FlowModel(ms(START))  # type: ignore[arg-type]
        self.handles: dict[str, Handle] = {}
        self.told: list[str] = []
        self.minted = 0

    # What steps are made of

    def uuid(self, name: str) -> UUID:
        return id_in(PARTITION, uuid5(SPACE, name))

    def id(self, member: Member) -> ff.ExecutionId:
        return id_in(PARTITION, self.uuid(member.name))

    def name(self) -> str:
        self.minted += 1
        return f"n{self.minted}"

    def pick(self, number: int, want: Callable[[Member], bool] = lambda _: True) -> Member | None:
        """One of the executions for which something holds."""
        found = [member for member in self.model.members.values() if want(member)]
        return found[number % len(found)] if found else None

    async def agree(self, call: Awaitable[_T], expect: Callable[[], Any], read: Callable[[_T], Any]) -> None:
        """The engine and the model answer the same, or refuse for the same reason."""
        try:
            answer: Any = read(await call)
        except ff.FlowFabricError as error:
            answer = {"refused": error.kind}
        try:
            expected = expect()
        except Refused as error:
            expected = {"refused": error.kind}
        same(answer, expected, "answer")

    @contextlib.asynccontextmanager
    async def busy(self, bits: int) -> AsyncIterator[list[str]]:
        """Lock some groups; returns the names of their downstreams."""
        names = [name for place, name in enumerate(self.model.groups) if bits >> place & 1 and bits & 32]
        transaction = self.other.transaction()
        await transaction.start()
        try:
            await self.other.fetch(
                "select from flowfabric.edge_group where downstream = any ($1) for update", list(map(self.uuid, names))
            )
            yield names
        finally:
            await transaction.rollback()

    def holders(self, number: int) -> Member | None:
        return self.pick(number, lambda member: member.state == "active" and not member.lease_lost)

    # The graph

    async def begin(self, count: int, edges: list[tuple[int, int, int]], policies: list[int]) -> None:
        """A graph submitted as a whole."""
        names = [self.name() for _ in range(count)]
        nodes, given = [], []
        for place, name in enumerate(names):
            ups = [(names[up % place], ref) for up, down, ref in edges if down % count == place and place]
            policy = POLICIES[policies[place % len(policies)] % len(POLICIES)] if ups else AllOf()
            if (facts(policy)[1] or 0) > len(ups):
                policy = AllOf()
            after = [
                NewEdge(upstream=up, data_passing_ref="r" if ref % 2 else None, edge_id=self.uuid(f"{name}-{i}"))
                for i, (up, ref) in enumerate(ups)
            ]
            times = times_of(policies[place % len(policies)])
            execution = self.new(
                name, delay_until=times[0] and times[0] * MS, execution_deadline_at=times[1] and times[1] * MS
            )
            nodes.append(NewNode(name=name, execution=execution, after=after, policy=policy))
            given.append((name, ups, policy, times))
        await self.engine.submit_flow(nodes, flow_id=FLOW)
        self.grow(given)

    def grow(
        self, given: list[tuple[str, list[tuple[str, int]], EdgeGroupPolicy, tuple[int | None, int | None]]]
    ) -> None:
        """The same in the model."""
        model = self.model
        model.add([self.created(name, times) for name, _, _, times in given])
        for name, ups, policy, _ in given:
            if ups:
                model.set_policy(model.members[name], *facts(policy))
        for name, ups, _, _ in given:
            edges = [
                (f"{name}-{i}", model.members[up], model.members[name], bool(ref % 2))
                for i, (up, ref) in enumerate(ups)
            ]
            if edges:
                model.stage(edges, model.revision)
                model.apply([edge[0] for edge in edges])

    def new(self, name: str, **fields: Any) -> NewExecution:
        uuid = self.uuid(name)
        return NewExecution(
            execution_kind=name,
            execution_id=id_in(PARTITION, uuid),
            input_payload=name.encode(),
            policy=POLICY,
            **fields,
        )

    @step(2)
    async def create(self, a: int, b: int, c: int) -> None:
        """An execution for the flow, which is not yet its member."""
        if len(self.model.members) >= MOST:
            return
        name = self.name()
        times = times_of(a)
        await self.engine.create_execution(
            execution_kind=name,
            execution_id=id_in(PARTITION, self.uuid(name)),
            flow_id=FLOW,
            input_payload=name.encode(),
            policy=POLICY,
            delay_until=times[0] and times[0] * MS,
            execution_deadline_at=times[1] and times[1] * MS,
        )
        made = self.created(name, times)
        if c % 4:
            await self.add_one(made)

    def created(self, name: str, times: tuple[int | None, int | None]) -> Member:
        """A new execution in the model."""
        delay, deadline = (None if by is None else self.model.now + by for by in times)
        return self.model.create(name, self.uuid(name).int, delay, deadline)

    async def add_one(self, member: Member) -> None:
        was = member.in_flow
        await self.agree(
            self.engine.add_execution_to_flow(FLOW, self.id(member)),
            lambda: (self.model.add([member]), was),
            lambda a: (
                (a.new_node_count, False) if isinstance(a, Added) else (a.node_count, isinstance(a, AlreadyMember))
            ),
        )

    @step()
    async def add(self, a: int, b: int, c: int) -> None:
        if member := self.pick(a):
            await self.add_one(member)

    @step()
    async def extend(self, a: int, b: int, c: int) -> None:
        """A new member behind others, in one call."""
        if len(self.model.members) >= MOST:
            return
        members = [m for m in self.model.members.values() if m.in_flow]
        ups = [(one.name, b >> place) for place, one in enumerate(members) if a >> place & 1]
        policy = POLICIES[c % len(POLICIES)] if ups else AllOf()
        if (facts(policy)[1] or 0) > len(ups):
            policy = AllOf()
        name = self.name()
        node = NewNode(
            name=name,
            execution=self.new(name),
            policy=policy,
            after=[
                NewEdge(
                    upstream=self.id(self.model.members[up]),
                    data_passing_ref="r" if ref % 2 else None,
                    edge_id=self.uuid(f"{name}-{i}"),
                )
                for i, (up, ref) in enumerate(ups)
            ],
        )

        def expect() -> None:
            self.model.check_open()
            self.grow([(name, ups, policy, (None, None))])

        await self.agree(self.engine.extend_flow(FLOW, [node]), expect, lambda _: None)

    @step(2)
    async def set_policy(self, a: int, b: int, c: int) -> None:
        if member := self.pick(a):
            policy = POLICIES[b % len(POLICIES)]
            await self.agree(
                self.engine.set_edge_group_policy(FLOW, self.id(member), policy),
                lambda: self.model.set_policy(member, *facts(policy)),
                str,
            )

    def pairs(self, a: int, b: int, count: int) -> list[tuple[str, Member, Member, bool]]:
        """New edges, mostly forward."""
        members = list(self.model.members.values())
        found = []
        for i in range(count if members else 0):
            up, down = (a >> 2 * i) % len(members), (b >> 2 * i) % len(members)
            if up > down and a % 8:
                up, down = down, up
            found.append((f"e{len(self.model.edges) + i}", members[up], members[down], bool(a >> i & 2)))
        return found

    @step(4)
    async def stage(self, a: int, b: int, c: int) -> None:
        """Put an edge into the graph, and perhaps apply it."""
        edges = self.pairs(a, b, 1)
        revision = self.model.revision - (c % 16 == 1)
        for name, up, down, ref in edges:
            await self.agree(
                self.engine.stage_dependency_edge(
                    FLOW,
                    edge_id=self.uuid(name),
                    upstream_execution_id=self.id(up),
                    downstream_execution_id=self.id(down),
                    expected_graph_revision=max(revision, 0),
                    data_passing_ref="r" if ref else None,
                ),
                lambda: self.model.stage(edges, max(revision, 0)),
                lambda a: a.new_graph_revision,
            )
            if c % 3 and name in self.model.edges:
                await self._apply(name)

    @step(3)
    async def apply(self, a: int, b: int, c: int) -> None:
        names = [name for name, edge in self.model.edges.items() if not edge.applied or a % 5 == 0]
        if names:
            await self._apply(names[b % len(names)])

    async def _apply(self, name: str) -> None:
        edge = self.model.edges[name]
        await self.agree(
            self.engine.apply_dependency_to_child(
                FLOW,
                edge_id=self.uuid(name),
                upstream_execution_id=self.id(edge.up),
                downstream_execution_id=self.id(edge.down),
                data_passing_ref="r" if edge.ref else None,
            ),
            lambda: self.model.apply([name]),
            lambda answer: answer.unsatisfied_count if isinstance(answer, Applied) else _none(answer, AlreadyApplied),
        )

    @step(2)
    async def stage_and_apply(self, a: int, b: int, c: int) -> None:
        edges = self.pairs(a, b, 1 + c % 3)
        if not edges:
            return
        revision = self.model.revision

        def expect() -> int:
            answer = self.model.stage(edges, revision)
            self.model.apply([edge[0] for edge in edges])
            return answer

        new = [
            Edge(
                edge_id=self.uuid(name),
                upstream=self.id(up),
                downstream=self.id(down),
                data_passing_ref="r" if ref else None,
            )
            for name, up, down, ref in edges
        ]
        await self.agree(
            self.engine.stage_and_apply_edges(FLOW, new, expected_graph_revision=revision), expect, lambda a: a
        )

    # Workers

    @step(8)
    async def claim(self, a: int, b: int, c: int) -> None:
        """A claimable member, or sometimes none."""
        member = self.pick(a, self.model.claimable) if b % 8 else self.pick(a)
        if member is not None:
            await self._claim(member)

    async def _claim(self, member: Member) -> None:
        found = await self.engine.claim(**WORKER, kinds=[member.name], lease_ttl=DAY)
        how = self.model.claim(member)
        assert (found is None) == (how is None), f"claim of {member}: engine {found}, model {how}"
        if found is not None:
            self.handles[member.name] = found.handle
            kind = "resumed" if found.handle.kind == "resumed" else found.attempt_type
            expected = {
                "input": member.name.encode() if member.injected is None else member.injected,
                "attempt": member.attempts - 1,
                "resumed": how == "resumed",
                "reclaimed": how == "reclaimed",
            }
            seen = {
                "input": found.input_payload,
                "attempt": found.handle.attempt_index,
                "resumed": kind == "resumed",
                "reclaimed": kind == "reclaim",
            }
            same(seen, expected, "claim")

    @step(8)
    async def complete(self, a: int, b: int, c: int) -> None:
        if member := self.holders(a):
            result = None if b % 4 == 0 else f"{member.name}:{member.attempts}".encode()
            async with self.busy(c) as names:
                await self.engine.complete(self.handles.pop(member.name), result)
                self.model.end([member], "completed", results={member.name: result}, busy=names)

    @step(2)
    async def complete_many(self, a: int, b: int, c: int) -> None:
        members = [
            m for m in self.model.members.values() if m.state == "active" and not m.lease_lost and a >> m.order % 7 & 1
        ]
        if not members:
            return
        if b % 2:
            members.reverse()
        async with self.busy(c) as names:
            done = [Completion(self.handles.pop(m.name), m.name.encode()) for m in members]
            assert not any(isinstance(one, ff.FlowFabricError) for one in await self.engine.complete_many(done))
            self.model.end(members, "completed", results={m.name: m.name.encode() for m in members}, busy=names)

    @step(6)
    async def fail(self, a: int, b: int, c: int) -> None:
        if member := self.holders(a):
            async with self.busy(c) as names:
                await self.engine.fail(
                    self.handles.pop(member.name), "no", failure_class="permanent" if b % 3 else "transient"
                )
                self.model.fail(member, retryable=b % 3 == 0, busy=names)

    @step(3)
    async def cancel(self, a: int, b: int, c: int) -> None:
        if member := self.pick(a, lambda member: not member.ended):
            async with self.busy(c) as names:
                await self.engine.cancel(Operator(self.id(member)), "no longer wanted")
                self.model.end([member], "cancelled", reason="no longer wanted", busy=names)

    @step(4)
    async def wait_children(self, a: int, b: int, c: int) -> None:
        if member := self.holders(a):
            await self.engine.wait_children(self.handles[member.name])
            self.model.wait_children(member)

    @step(2)
    async def give_back(self, a: int, b: int, c: int) -> None:
        if member := self.holders(a):
            handle = self.handles[member.name]
            if b % 2:
                await self.engine.release(handle)
            else:
                await self.engine.delay(handle, timedelta(seconds=10))
            self.model.give_back(member, 0 if b % 2 else 10_000)

    @step(2)
    async def lose_lease(self, a: int, b: int, c: int) -> None:
        if member := self.holders(a):
            await self.engine.revoke_lease(self.id(member))
            self.model.lose_lease(member)

    @step(2)
    async def suspend(self, a: int, b: int, c: int) -> None:
        if member := self.holders(a):
            await self.engine.suspend(
                self.handles[member.name], waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k")
            )
            self.model.suspend(member)

    @step(2)
    async def resume(self, a: int, b: int, c: int) -> None:
        if member := self.pick(a, lambda member: member.state == "suspended"):
            delay = (0, 10_000)[b % 2]
            await self.engine.resume_execution(self.id(member), "operator", delay * MS)
            self.model.resume(member, delay)

    @step(2)
    async def use_an_old_handle(self, a: int, b: int, c: int) -> None:
        """A skipped or cancelled execution has no lease."""
        member = self.pick(a, lambda m: m.name in self.handles and m.state in ("skipped", "cancelled", "expired"))
        if member is None:
            return
        handle = self.handles[member.name]
        calls = [
            lambda: self.engine.complete(handle, b"late"),
            lambda: self.engine.fail(handle, "late", failure_class="permanent"),
            lambda: self.engine.renew(handle),
            lambda: self.engine.wait_children(handle),
        ]
        with pytest.raises(ff.FlowFabricError):
            await calls[b % len(calls)]()

    # Operators and time

    @step(5)
    async def replay(self, a: int, b: int, c: int) -> None:
        member = self.pick(a, lambda member: member.ended) if b % 8 else self.pick(a)
        if member is None:
            return

        def expect() -> str:
            self.model.replay(member)
            return member.state

        await self.agree(self.engine.replay_execution(self.id(member)), expect, lambda a: a.public_state.value)

    @step(2)
    async def pass_time(self, a: int, b: int, c: int) -> None:
        by = (1_000, 6_000, 11_000, 70_000)[a % 4]
        await self.world.move_clock(by)
        await self.engine.run_timers("deadline")
        await self.engine.run_timers("delay")
        self.model.pass_time(by)

    # The cascade, siblings, cancellation

    @step(5)
    async def dispatch(self, a: int, b: int, c: int) -> None:
        events, edges = 1 + a % 3, 1 + b % 3
        done = await self.engine.dispatch_cascades(limit=events, edges=edges)
        unresolved = {row["edge_id"] for row in await self.world.sql.fetch(_UNRESOLVED)}
        left = [name for name in self.model.edges if self.uuid(name) in unresolved]
        same((done.seen, done.finished, done.resolved), self.model.dispatch(events, edges, left), "dispatch")
        assert not done.failed, done.message

    @step()
    async def dispatch_one(self, a: int, b: int, c: int) -> None:
        if self.model.events:
            event = self.model.events[a % len(self.model.events)]
            answer = await self.engine.dispatch_completion(event.number)
            same(answer, Advanced(self.model.dispatch_completion(event)), "dispatch_completion")
            assert await self.engine.dispatch_completion(event.number) == NoOp()

    @step()
    async def reconcile_edges(self, a: int, b: int, c: int) -> None:
        """Finds nothing, because nothing was forgotten."""
        done, place = await self.engine.reconcile_edges()
        assert (done.reconciled, place) == (0, None)

    @step(3)
    async def cancel_siblings(self, a: int, b: int, c: int) -> None:
        names = [name for name, group in self.model.groups.items() if group.siblings is not None]
        if names:
            down, limit = self.model.members[names[a % len(names)]], 1 + b % 3
            done = await self.engine.cancel_siblings(FLOW, self.id(down), limit=limit)
            same((done.action, done.cancelled), self.model.cancel_siblings(down, limit), "cancel_siblings")

    @step()
    async def reconcile_siblings(self, a: int, b: int, c: int) -> None:
        if member := self.pick(a, lambda member: member.name in self.model.groups):
            answer = await self.engine.reconcile_sibling_cancel_group(FLOW, self.id(member))
            same(answer, self.model.reconcile_siblings(member), "reconcile_siblings")

    @step()
    async def cancel_flow(self, a: int, b: int, c: int) -> None:
        policy = ("cancel_all", "cancel_all", "cancel_pending", "flow_only")[a % 4]
        reason = ("", "enough")[b % 2]

        def read(answer: FlowCancelHeader | FlowAlreadyTerminal) -> Any:
            if isinstance(answer, FlowAlreadyTerminal):
                same(
                    (str(answer.stored_cancellation_policy), answer.stored_cancel_reason),
                    (self.model.policy, self.model.reason),
                    "stored",
                )
            return answer.target_count

        await self.agree(
            self.engine.cancel_flow_header(FLOW, reason=reason, cancellation_policy=policy, grace=timedelta()),
            lambda: self.model.cancel_header(policy, reason),
            read,
        )

    @step(3)
    async def cancel_members(self, a: int, b: int, c: int) -> None:
        limit = 1 + a % 3
        owed = len(self.model.owed)
        done = await self.engine.reconcile_cancellations(members=limit, chunks=1)
        assert (done.handled, done.failed) == (min(owed, limit), 0)
        self.model.cancel_members(limit)

    @step()
    async def acknowledge(self, a: int, b: int, c: int) -> None:
        """One that has ended, or that nothing was owed to."""
        if member := self.pick(a, lambda member: member.ended or member not in self.model.owed):
            await self.engine.ack_cancel_member(FLOW, self.id(member))
            self.model.acknowledge(member)

    # Looking at everything

    async def settle(self) -> None:
        """Until nothing is left to be done."""
        while self.model.events:
            await self.dispatch(2, 2, 0)
            await self.check()
        while any(group.siblings is not None for group in self.model.groups.values()) or self.model.owed:
            await self.cancel_siblings(0, 2, 0)
            await self.cancel_members(2, 0, 0)
            await self.check()
            while self.model.events:
                await self.dispatch(2, 2, 0)
                await self.check()

    async def check(self) -> None:
        assert not (found := await self.engine.audit(events=True)), found
        model = self.model
        row = await self.world.sql.fetchrow(_PICTURE)
        picture = {name: rows.decode_json(row[name]) for name in row.keys()}  # noqa: SIM118 - a record iterates over values
        names = {str(self.uuid(name)): name for name in [*model.members, *model.edges]}
        same(
            {names[one.pop("id")]: one for one in picture["executions"]},
            {
                m.name: {
                    "in_flow": m.in_flow,
                    "state": m.state,
                    "blocking_reason": m.blocked_for,
                    "pending": m.pending,
                    "lost": m.lease_lost,
                    "replays": m.replays,
                    "attempts": m.attempts,
                    "delay": m.delay_until,
                    "reason": m.reason,
                    "completed": m.completed_at,
                    "result": None if m.result is None else m.result.hex(),
                    "injected": None if m.injected is None else m.injected.hex(),
                    "outcomes": m.outcomes,
                    "owed": m in model.owed,
                }
                for m in model.members.values()
            },
            "executions",
        )
        same(
            {names[one["id"]]: (one["applied"], one["outcome"]) for one in picture["edges"]},
            {edge.name: (edge.applied, edge.outcome) for edge in model.edges.values()},
            "edges",
        )
        same(
            {
                names[one["id"]]: {k: v for k, v in one.items() if k != "id"}
                | {"siblings": None if one["siblings"] is None else [names[s] for s in one["siblings"]]}
                for one in picture["groups"]
            },
            {name: self.group_view(name, group) for name, group in model.groups.items()},
            "groups",
        )
        events = sorted(
            ((names[one["id"]], one["run"], one["outcome"], one["seq"]) for one in picture["events"]),
            key=lambda one: one[3],
        )
        same(
            sorted(one[:3] for one in events),
            sorted((event.member.name, event.run, event.outcome) for event in model.events),
            "undispatched events",
        )
        for name, run, _, number in events:
            next(e for e in model.events if (e.member.name, e.run) == (name, run)).number = number
        same(
            picture["flow"],
            {
                "state": "open" if model.policy is None else "cancelled",
                "policy": model.policy,
                "reason": model.reason,
                "revision": model.revision,
                "backlog": bool(model.owed),
            },
            "flow",
        )
        await self.check_summary()

    def group_view(self, name: str, group: Group) -> dict[str, Any]:
        edges = self.model.into(self.model.members[name])
        count = [edge.outcome for edge in edges]
        return {
            "policy": [group.kind, group.k, group.cancel_rest],
            "n": len(edges),
            "succeeded": count.count("success"),
            "failed": sum(outcome in ("failed", "cancelled", "expired") for outcome in count),
            "skipped": count.count("skipped"),
            "state": group.state,
            "satisfied_at": group.satisfied_at,
            "flag": group.siblings is not None,
            "reason": group.reason,
            "siblings": None if group.siblings is None else [member.name for member in group.siblings],
        }

    async def check_summary(self) -> None:
        """What the projector makes of the flow, if it was told that there was a change."""
        await self.engine.project_flow_summaries()
        summary = await self.engine.read_flow_summary(FLOW)
        if summary is None:
            assert not any(member.in_flow for member in self.model.members.values())
            return
        state, buckets = self.model.summary()
        same(
            {name: getattr(summary, f"members_{name}") for name in _BUCKETS}
            | {"state": summary.public_flow_state.value, "total": summary.total_members},
            {name: buckets[name] for name in _BUCKETS} | {"state": state, "total": buckets.total()},
            "summary",
        )


def _none(answer: object, kind: type) -> None:
    assert isinstance(answer, kind)


_BUCKETS = (
    "completed", "failed", "cancelled", "expired", "skipped", "active", "suspended", "waiting", "delayed",
    "rate_limited", "waiting_children",
)  # fmt: skip
_UNRESOLVED = "select edge_id from flowfabric.edge where outcome is null"
_MS = "(extract(epoch from {}) * 1000)::bigint"
_PICTURE = f"""
select
    (select coalesce(jsonb_agg(jsonb_build_object(
         'id', e.id, 'in_flow', e.flow_id is not null, 'state', e.state, 'blocking_reason', e.blocking_reason,
         'pending', e.pending, 'lost', e.lease_lost is not null, 'replays', e.replays, 'attempts', e.attempts,
         'delay', {_MS.format("e.delay_until")}, 'reason', e.cancellation_reason,
         'completed', {_MS.format("e.completed_at")}, 'result', encode(e.result, 'hex'),
         'injected', (select encode(i.payload, 'hex') from flowfabric.injected_input i where i.id = e.id),
         'outcomes', (select coalesce(jsonb_agg(v.outcome order by v.seq), '[]') from flowfabric.event v
                      where v.id = e.id and v.outcome is not null),
         'owed', exists (select from flowfabric.cancel_member c where c.id = e.id))), '[]')
     from flowfabric.execution e)::text as executions,
    (select coalesce(jsonb_agg(jsonb_build_object(
         'id', d.edge_id, 'applied', d.applied_at is not null, 'outcome', d.outcome)), '[]')
     from flowfabric.edge d)::text as edges,
    (select coalesce(jsonb_agg(jsonb_build_object(
         'id', g.downstream, 'policy', jsonb_build_array(g.policy, g.k, g.cancel_rest), 'n', g.n,
         'succeeded', g.succeeded, 'failed', g.failed, 'skipped', g.skipped, 'state', g.state,
         'satisfied_at', {_MS.format("g.satisfied_at")}, 'flag', g.cancel_siblings_pending,
         'reason', g.cancel_siblings_reason,
         'siblings', (select to_jsonb(s.siblings) from flowfabric.sibling_cancel s
                      where s.downstream = g.downstream))), '[]')
     from flowfabric.edge_group g)::text as groups,
    (select coalesce(jsonb_agg(jsonb_build_object('id', p.id, 'run', p.run, 'outcome', p.outcome, 'seq', p.seq)), '[]')
     from flowfabric.pending_cascade p)::text as events,
    (select jsonb_build_object(
         'state', f.state, 'policy', f.cancellation_policy, 'reason', f.cancel_reason,
         'revision', f.node_count + f.edge_count,
         'backlog', exists (select from flowfabric.cancel_backlog))
     from flowfabric.flow f)::text as flow
"""

SETTINGS = settings(
    max_examples=sampling.examples(40, 12),
    deadline=None,  # a step is several round trips on a shared machine
    derandomize=True,  # every run plays the same histories; raise max_examples and set this to False to hunt
    print_blob=True,
    database=None,
    phases=[Phase.generate],  # to shrink a history takes longer than a run
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def world(server: str) -> Iterator[tuple[World, asyncpg.Connection[Any]]]:
    world = World()
    world.run(world.open(server))
    name = world.run(world.sql.fetchval("select current_database()"))
    other = world.run(asyncpg.connect(in_database(server, name)))
    yield world, other
    world.run(other.close())
    world.close()


number = st.integers(0, 63)
steps = st.tuples(
    st.sampled_from([name for name, weight in _STEPS.items() for _ in range(weight)]), number, number, number
)
graphs = st.tuples(
    st.integers(1, 6),
    st.lists(st.tuples(number, number, number), max_size=9),
    st.lists(number, min_size=1, max_size=6),
)


def test_the_engine_and_the_model_agree_in_every_history(world: tuple[World, asyncpg.Connection[Any]]) -> None:
    @SETTINGS
    @given(graphs, st.lists(steps, min_size=5, max_size=45))
    def play(graph: tuple[int, Any, Any], history: list[tuple[str, int, int, int]]) -> None:
        world[0].run(_play(*world, graph, history))

    play()


async def _play(
    world: World, other: asyncpg.Connection[Any], graph: tuple[int, Any, Any], history: list[tuple[str, int, int, int]]
) -> None:
    await world.reset()
    at = History(world, other)
    await at.begin(*graph)
    await at.check()
    for name, a, b, c in history:
        await world.move_clock(1)
        at.model.now += 1
        await getattr(at, name)(a, b, c)
        await at.check()
    await at.settle()


# What random histories seldom meet, as fixed ones


def _node(name: str, *after: str, ref: bool = False, **fields: Any) -> NewNode:
    edges = [NewEdge(upstream=up, data_passing_ref="r" if ref else None) for up in after]
    return NewNode(name=name, execution=NewExecution(execution_kind=name, policy=FAST), after=edges, **fields)


async def _hold(engine: ff.Engine, name: str) -> Handle:
    return (await claim_one(engine, kinds=[name])).handle


async def _fail(engine: ff.Engine, name: str) -> None:
    await engine.fail(await _hold(engine, name), "no", failure_class="permanent")


async def test_a_replay_that_finds_its_race_won_cancels_the_rest(engine: CheckedEngine) -> None:
    flow = await engine.submit_flow([_node("a"), _node("b"), _node("c", "a", "b", policy=AnyOf())])
    await _fail(engine, "a")
    await _fail(engine, "b")
    for name in "ab":
        await engine.replay_execution(flow.nodes[name])
    await engine.complete(await _hold(engine, "a"), b"a")
    await engine.cancel_siblings()

    assert (await engine.replay_execution(flow.nodes["c"])).public_state == "waiting"
    assert (await engine.cancel_siblings()).cancelled == 1
    assert await engine.read_execution_state(flow.nodes["b"]) == "cancelled"


async def test_a_late_edge_into_a_won_race_cancels_only_its_own_upstream(engine: CheckedEngine) -> None:
    flow = await engine.submit_flow([_node("a"), _node("b"), _node("late"), _node("c", "a", "b", policy=AnyOf())])
    await engine.complete(await _hold(engine, "a"), b"a")
    assert (await engine.cancel_siblings()).cancelled == 1
    await engine.replay_execution(flow.nodes["b"])

    edge = Edge(edge_id=mint_uuid(), upstream=flow.nodes["late"], downstream=flow.nodes["c"])
    await engine.stage_and_apply_edges(flow.flow_id, [edge], expected_graph_revision=6)
    assert (await engine.cancel_siblings()).cancelled == 1
    assert await engine.read_execution_state(flow.nodes["late"]) == "cancelled"
    assert await engine.read_execution_state(flow.nodes["b"]) == "waiting"


async def test_a_replay_is_given_the_result_that_decides_its_group(engine: CheckedEngine) -> None:
    """The first success in time decides, whichever edges ask for results."""
    plain = NewEdge(upstream="a")
    asking = NewEdge(upstream="b", data_passing_ref="r")
    last = NewNode(
        name="c",
        execution=NewExecution(execution_kind="c", input_payload=b"own"),
        after=[plain, asking],
        policy=AnyOf(OnSatisfied.LET_RUN),
    )
    flow = await engine.submit_flow([_node("a"), _node("b"), last])
    await _fail(engine, "a")
    await _fail(engine, "b")
    for name in "ba":
        await engine.replay_execution(flow.nodes[name])
        await engine.complete(await _hold(engine, name), name.encode())

    await engine.replay_execution(flow.nodes["c"])
    assert (await claim_one(engine)).input_payload == b"b"


async def test_of_an_execution_that_ended_twice_the_first_end_counts(
    engine: CheckedEngine, sql: asyncpg.Connection[Any], database: str
) -> None:
    """Both ends could not be counted at once; b had been skipped, then it was cancelled."""
    flow = await engine.submit_flow([_node("a"), _node("b", "a"), _node("c", "b")])
    await _fail(engine, "a")
    await engine.replay_execution(flow.nodes["b"])
    other = await asyncpg.connect(database)
    try:
        async with other.transaction():
            await other.fetch("select from flowfabric.edge_group for update")
            await engine.cancel(Operator(flow.nodes["b"]), "no")
    finally:
        await other.close()
    assert await sql.fetchval("select count(*) from flowfabric.pending_cascade where id = $1", flow.nodes["b"]) == 2

    assert [(await engine.dispatch_cascades()).resolved for _ in range(3)] == [1, 0, 0]
    found = await engine.describe_flow(flow.flow_id)
    assert found is not None
    group = next(one for one in found.edge_groups if one.downstream_execution_id == flow.nodes["c"])
    assert (group.skipped_count, group.failed_count) == (1, 0)


async def test_a_delay_after_a_suspension_is_kept_while_a_dependency_is_open(engine: CheckedEngine) -> None:
    flow = await engine.submit_flow([_node("a"), _node("b")])
    held = await _hold(engine, "b")
    await engine.suspend(held, waitpoints=[Fresh(mint_uuid(), "k")], resume_condition=on("k"))
    edge = Edge(edge_id=mint_uuid(), upstream=flow.nodes["a"], downstream=flow.nodes["b"])
    await engine.stage_and_apply_edges(flow.flow_id, [edge], expected_graph_revision=2)
    await engine.resume_execution(flow.nodes["b"], "operator", timedelta(hours=1))
    assert await engine.read_execution_state(flow.nodes["b"]) == "waiting_children"

    await engine.complete(await _hold(engine, "a"))
    found = await engine.describe_execution(flow.nodes["b"])
    assert found is not None
    assert (found.public_state, found.blocking_reason) == ("delayed", "waiting_for_resume_delay")


# Whole graphs, worked on by several at once


class Crew:
    """Workers that do with each node what was laid down for it, and the duties beside them."""

    def __init__(self, engine: ff.Engine, rng: random.Random, scripts: dict[str, list[str]]) -> None:
        self.engine = engine
        self.rng = rng
        self.scripts = {name: list(script) for name, script in scripts.items()}
        self.inputs: dict[str, bytes] = {}
        self.lost: list[str] = []  # whose lease was gone when something was to be done with it

    async def work(self, flow_id: FlowId) -> None:
        while True:
            claimed = await self.engine.claim_many(**WORKER, limit=self.rng.randint(1, 3))
            for one in claimed:
                self.inputs[one.execution_kind] = one.input_payload
                try:
                    await self.act(one)
                except (ExecutionNotActive, StateError):
                    self.lost.append(one.execution_kind)
            if not claimed:
                if (await self.engine.flow_progress(flow_id))[1] == 0:
                    return
                await asyncio.sleep(0.001)

    async def act(self, one: Claimed) -> None:
        name = one.execution_kind
        match self.scripts[name].pop(0):
            case "crash":
                await self.engine.revoke_lease(one.execution_id)
            case "retry":
                await self.engine.fail(one.handle, "again")
            case "park":
                await self.engine.wait_children(one.handle)
            case "completed":
                await self.engine.complete(one.handle, f"result of {name}".encode())
            case "failed":
                await self.engine.fail(one.handle, "no", failure_class="permanent")
            case "cancelled":
                await self.engine.cancel(one.handle, "no")

    async def duties(self) -> None:
        while True:
            await self.engine.run_timers("delay")
            await self.engine.dispatch_cascades(limit=self.rng.randint(1, 9), edges=self.rng.randint(1, 9))
            await self.engine.cancel_siblings(limit=self.rng.randint(1, 3))
            await self.engine.project_flow_summaries()
            await asyncio.sleep(0)


@pytest.mark.each_value
@pytest.mark.parametrize("policies", ["that let run", "that cancel the rest"])
@pytest.mark.parametrize("seed", sampling.seeds(*range(5)))
async def test_a_graph_ends_as_the_rules_say_with_any_workers(database: str, seed: int, policies: str) -> None:
    rng = random.Random(seed)
    count = rng.randint(20, 40)
    names = [f"n{place}" for place in range(count)]
    races = policies == "that cancel the rest"
    fates = {name: rng.choices(["completed", "failed", "cancelled"], [8, 1, 1])[0] for name in names}
    scripts = {
        name: [word for word in ("crash", "retry", "park") if rng.random() < 0.2] + [fate]
        for name, fate in fates.items()
    }
    edges: list[tuple[str, str]] = []
    groups: dict[str, Group] = {}
    refs: dict[str, str] = {}
    nodes = []
    for place, name in enumerate(names):
        ups = rng.sample(names[max(0, place - 8) : place], min(place, rng.randint(0, 4)))
        policy: EdgeGroupPolicy = AllOf()
        if len(ups) > 1 and rng.random() < 0.6:
            rest = OnSatisfied.CANCEL_REMAINING if races else OnSatisfied.LET_RUN
            policy = Quorum(rng.randint(1, len(ups)), rest)
        elif ups:
            refs[name] = rng.choice(ups)
        edges += [(up, name) for up in ups]
        groups[name] = Group(*facts(policy))
        after = [NewEdge(upstream=up, data_passing_ref="r" if refs.get(name) == up else None) for up in ups]
        new = NewExecution(execution_kind=name, input_payload=b"own", policy=FAST)
        nodes.append(NewNode(name=name, execution=new, after=after, policy=policy))

    async with await ff.Engine.connect(database, max_size=6, notifications=False) as engine:
        flow = await engine.submit_flow(nodes)
        crew = Crew(engine, rng, scripts)
        duties = [asyncio.create_task(crew.duties()) for _ in range(2)]
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(crew.work(flow.flow_id) for _ in range(4)))
        finally:
            for one in duties:
                one.cancel()
            await asyncio.gather(*duties, return_exceptions=True)
        while (await engine.dispatch_cascades()).seen or (await engine.cancel_siblings()).action != "none":
            pass
        await engine.project_flow_summaries()

        assert await engine.audit(events=True) == []
        found = await engine.describe_flow(flow.flow_id)
        members = {member.name: member for member in await engine.list_flow_members(flow.flow_id)}
        summary = await engine.read_flow_summary(flow.flow_id)
        assert found is not None and summary is not None
        states = {name: member.state.value for name, member in members.items()}
        assert {states[name] for name in crew.lost} <= {"cancelled"}
        if not races:
            assert crew.lost == []
            expected, decisions = final_states(fates, edges, groups)
            same(states, expected, "states")
            by_id = {execution_id: name for name, execution_id in flow.nodes.items()}
            same(
                {by_id[group.downstream_execution_id]: group.group_state.value for group in found.edge_groups},
                decisions,
                "groups",
            )
        model = FlowModel(0)
        for name, member in members.items():
            model.members[name] = Member(
                name, 0, 0, state=member.state.value, in_flow=True, reason=member.cancellation_reason
            )
        assert summary.public_flow_state.value == model.summary()[0]
        for name, payload in crew.inputs.items():
            assert payload == (f"result of {refs[name]}".encode() if name in refs else b"own")
