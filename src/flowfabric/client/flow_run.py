"""A handle on one flow: wait for its nodes, read it, cancel it, replay it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload
from uuid import UUID

from flowfabric.client import current
from flowfabric.client.failure import result_of, task_failed
from flowfabric.client.following import FlowFollower, Follower, StreamReader, read_cursors, wait_seconds
from flowfabric.client.limits import owned_budget, raise_owned
from flowfabric.client.run import Run, connectors, known_app, span_of
from flowfabric.errors import FlowFailed, NotFound, TaskFailed, TimedOut
from flowfabric.values.budget import BudgetStatus
from flowfabric.values.durations import Duration
from flowfabric.values.execution import Outcome
from flowfabric.values.flow import (
    CancellationPolicy,
    CancellationScheduled,
    FlowCancelled,
    FlowGraph,
    FlowNode,
    FlowOutcome,
    FlowSnapshot,
    FlowSummary,
    MemberOutcome,
    PartiallyCancelled,
)
from flowfabric.values.graph import replayable
from flowfabric.values.ids import ExecutionId, FlowId, parse_execution_id
from flowfabric.values.spending import FlowUsage, usage_of
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.client.client import AsyncClient
    from flowfabric.client.connector import Connector
    from flowfabric.client.submission import Submittable
    from flowfabric.engine.flow_reads import Member

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_RACE = frozenset(("sibling_quorum_satisfied", "sibling_quorum_impossible"))
_WATCHED = 50  # members to wait for at a time
_NO_NODE = ExecutionId(UUID(int=0))  # to check options before any node is known


class Named(Protocol[R_co]):
    """A node of a built flow, as `flow.add` returns it."""

    @property
    def name(self) -> str: ...

    @property
    def task(self) -> Submittable[R_co] | None: ...


class FlowRun:
    """One submitted flow. It can be pickled; `client.flow(id)` makes one from an id.

    `nodes` maps the names of the nodes to their executions; `run["name"]` is a handle on one of them. For a flow made
    from an id it is filled by `refresh`, which `result` calls.
    """

    __slots__ = ("_connector", "flow_id", "is_new", "nodes")

    def __init__(
        self,
        flow_id: FlowId,
        *,
        nodes: Mapping[str, ExecutionId] | None = None,
        connector: Connector | None,
        is_new: bool = True,
    ) -> None:
        self.flow_id = flow_id
        self.nodes: dict[str, ExecutionId] = dict(nodes or {})
        self.is_new = is_new
        self._connector = connector

    @property
    def id(self) -> str:
        """The flow's id, as plain text."""
        return str(self.flow_id)

    def __repr__(self) -> str:
        return f"FlowRun({self.id!r}, {len(self.nodes)} nodes)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlowRun) and other.flow_id == self.flow_id

    def __hash__(self) -> int:
        return hash(self.flow_id)

    def __reduce__(self) -> tuple[Any, ...]:
        app = self._connector
        names = (None, None) if app is None else (app.key, app.name)
        return _revive, (self.id, {name: str(one) for name, one in self.nodes.items()}, self.is_new, *names)

    @overload
    def __getitem__(self, node: str) -> Run[Any]: ...
    @overload
    def __getitem__(self, node: Named[R]) -> Run[R]: ...
    def __getitem__(self, node: str | Named[Any]) -> Run[Any]:
        """A handle on one node, by name or by the node that `flow.add` returned."""
        wanted = node if isinstance(node, str) else node.name
        if wanted not in self.nodes:
            raise NotFound(
                "node", wanted, detail=f"flow {self.flow_id} has {', '.join(list(self.nodes)[:10]) or 'none'}"
            )
        return Run(self.nodes[wanted], kind=None, connector=self._app())

    def _app(self) -> Connector:
        return known_app(self._connector, "client.flow(run)")

    async def _client(self) -> AsyncClient:
        return await self._app().client()

    async def _members(self, *, results: bool = False) -> list[tuple[str, Member]]:
        """Its members by name: first those in `nodes`, in that order, then the others in the order of creation."""
        engine = (await self._client()).engine
        members = await engine.list_flow_members(self.flow_id, results=results)
        if not members:
            await engine.flow_progress(self.flow_id)  # NotFound, unless the flow exists without members
        # Keep the names of this handle; number nodes that several tasks added under the same name.
        names = {execution_id: name for name, execution_id in self.nodes.items()}
        order = {execution_id: place for place, execution_id in enumerate(names)}
        taken = {names[member.execution_id] for member in members if member.execution_id in names}
        found: list[tuple[str, Member]] = []
        counts: dict[str, int] = {}
        for member in members:
            title = named(member)
            name = names.get(member.execution_id) or title
            while member.execution_id not in names and name in taken:
                counts[title] = counts.get(title, 1) + 1
                name = f"{title}-{counts[title]}"
            taken.add(name)
            found.append((name, member))
        found.sort(key=lambda one: order.get(one[1].execution_id, len(order)))
        self.nodes = {name: member.execution_id for name, member in found}
        return found

    async def refresh(self) -> FlowRun:
        """Read the nodes again, including those added since."""
        await self._members()
        return self

    async def usage(self) -> FlowUsage:
        """Return what its nodes and all they submitted used and hold: in all, by budget, by node and by execution."""
        members = await self._members()
        found = usage_of(await (await self._client()).engine.read_usage(self.flow_id))
        return FlowUsage(
            total=found.total,
            held=found.held,
            by_budget=found.by_budget,
            by_execution=found.by_execution,
            by_node={
                name: found.by_execution[one.execution_id]
                for name, one in members
                if one.execution_id in found.by_execution
            },
        )

    async def budget(self) -> BudgetStatus | None:
        """Its own budget (`ff.Budget`) with what is used and held of it; None if it was submitted without."""
        return await owned_budget((await self._client()).engine, self.flow_id)

    async def raise_budget(self, amounts: Mapping[str, int] | None = None, /, **dimensions: int) -> BudgetStatus:
        """Add to its own budget, or take away with a negative amount; what waits for it continues if there is room."""
        return await raise_owned((await self._client()).engine, self.flow_id, amounts, dimensions)

    async def wait(self, timeout: Duration | None = None) -> None:
        """Wait until every node has ended, also those added meanwhile. `TimedOut` if that takes too long.

        Inside a task the wait is durable: it holds no worker.
        """
        span = span_of(timeout)
        if (scope := current.scope_of(self._app())) is not None:
            await scope.end_of_flow(self.flow_id, self.live, span)
            return
        client = await self._client()
        begun = time.monotonic()
        live = await self.live()  # always checked once, even with a zero timeout
        try:
            async with asyncio.timeout(None if span is None else begun + span.total_seconds() - time.monotonic()):
                while live:
                    await asyncio.gather(*(client.outcomes.wait(one) for one in live[-_WATCHED:]))
                    live = await self.live()
        except TimeoutError:
            raise TimedOut("flow", round((span or timedelta()).total_seconds() * 1000)) from None

    async def live(self) -> list[ExecutionId]:
        """Members that have not ended, in the order of creation: the last ones mostly depend on the others."""
        return [member.execution_id for _, member in await self._members() if not member.state.is_terminal]

    async def result(self, timeout: Duration | None = None) -> dict[str, Any]:
        """Wait until all nodes have ended and return their results by name. `FlowFailed` names the failed nodes.

        Nodes that lost a race, or were skipped because of one, are left out. Inside a task the wait is durable, and the
        results are recorded.
        """
        ended = await self._ended(timeout)
        results: dict[str, Any] = {}
        failures: dict[str, TaskFailed] = {}
        client = await self._client()
        for member in ended.members:
            if member.outcome.state is State.COMPLETED:
                results[member.name] = result_of(
                    member.execution_id, member.outcome, client.result_type(member.execution_kind), client.codecs
                )
            elif member.name in ended.failed:
                failures[member.name] = task_failed(member.execution_id, member.outcome, client.codecs)
        if failures:
            skipped = [member.name for member in ended.members if member.outcome.state is State.SKIPPED]
            raise FlowFailed(
                "cancelled" if ended.is_cancelled else "failed",
                self.flow_id,
                failures=failures,
                skipped=skipped,
                results=results,
                reason=ended.reason,
            )
        return results

    async def _ended(self, timeout: Duration | None) -> FlowOutcome:
        """Wait until all nodes have ended and return how; inside a task that is recorded."""
        if (scope := current.scope_of(self._app())) is not None:
            found = await scope.outcome_of_flow(self.flow_id, self.live, self._outcome, span_of(timeout))
            self.nodes = {member.name: member.execution_id for member in found.members}
            return found
        while True:
            await self.wait(timeout)
            if (ended := await self._outcome()) is not None:
                return ended

    async def _outcome(self) -> FlowOutcome | None:
        """How its nodes ended; None if some have not."""
        members = await self._members(results=True)
        if not all(member.state.is_terminal for _, member in members):
            return None
        failed = tuple(
            name
            for name, member in members
            if member.state not in (State.COMPLETED, State.SKIPPED) and member.cancellation_reason not in _RACE
        )
        header = await (await self._client()).engine.describe_flow(self.flow_id) if failed else None
        return FlowOutcome(
            members=tuple(
                MemberOutcome(
                    name=name,
                    execution_id=member.execution_id,
                    execution_kind=member.execution_kind,
                    outcome=Outcome(
                        state=member.state,
                        result=member.result,
                        result_encoding=member.result_encoding,
                        failure_reason=member.failure_reason,
                        failure_category=member.failure_category,
                        cancellation_reason=member.cancellation_reason,
                    ),
                )
                for name, member in members
            ),
            failed=failed,
            is_cancelled=header is not None and header.public_flow_state == "cancelled",
            reason=None if header is None else header.cancel_reason,
        )

    def stream(
        self,
        *,
        after: str | Mapping[str, str] | None = None,
        live: bool = True,
        keep_alive: Duration | None = None,
        timeout: Duration | None = None,
    ) -> StreamReader:
        """Follow what all its nodes emit; each item has its `node`. It ends when all nodes have ended.

        `after` is the `cursor` of an earlier reader, or has the cursor of an item of each node, by name. See
        `Run.stream`.
        """
        return self._reader(after, live, keep_alive, timeout)

    def _reader(
        self,
        after: str | Mapping[str, str] | None,
        live: bool,
        keep_alive: Duration | None,
        timeout: Duration | None,
        *,
        is_sealed: bool = False,
    ) -> StreamReader:
        """Follow the nodes; payloads that codecs wrote stay as they are stored if `is_sealed`."""
        known = read_cursors(after)
        Follower(_NO_NODE, live=live)
        silence, longest = wait_seconds(keep_alive, "keep_alive"), wait_seconds(timeout, "timeout", timedelta(0))

        async def begin() -> FlowFollower:
            client = await self._client()
            until = None if longest is None else time.monotonic() + longest

            async def nodes() -> Mapping[str, ExecutionId]:
                return (await self.refresh()).nodes

            def follower(name: str, execution_id: ExecutionId, cursor: str | None) -> Follower:
                left = None if until is None else max(until - time.monotonic(), 0)
                made = Follower(execution_id, after=cursor, live=live, timeout=left, node=name)
                return made.on(client.engine, None if is_sealed else client.codecs)

            async def state() -> str:
                return (await self.summary()).public_flow_state

            return FlowFollower(nodes, follower, known, silence, state)

        return StreamReader(begin)

    async def states(self) -> dict[str, State]:
        """The states of its nodes, by name."""
        return {name: member.state for name, member in await self._members()}

    async def get(self) -> FlowSnapshot:
        """Its header and joins; `NotFound` if it does not exist."""
        found = await (await self._client()).engine.describe_flow(self.flow_id)
        if found is None:
            raise NotFound("flow", self.flow_id)
        return found

    async def graph(self) -> FlowGraph:
        """Its nodes and edges, for drawing: see `flowfabric.drawing`."""
        found = await (await self._client()).engine.read_flow_graph(self.flow_id)
        if found is None:
            raise NotFound("flow", self.flow_id)
        return found

    async def summary(self) -> FlowSummary:
        """The number of nodes in each state, and the flow's own state."""
        found = await (await self._client()).engine.read_flow_summary(self.flow_id, now=True)
        if found is None:
            raise NotFound("flow", self.flow_id)
        return found

    async def cancel(
        self,
        reason: str = "cancelled by its submitter",
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        wait: bool = True,
    ) -> FlowCancelled | CancellationScheduled | PartiallyCancelled:
        """Close it and cancel its nodes: all, only those not running yet (`cancel_pending`), or none (`flow_only`)."""
        engine = (await self._client()).engine
        by = current.handled_id()
        return await engine.cancel_flow(
            self.flow_id, policy=policy, reason=reason, wait=wait, requester="" if by is None else str(by)
        )

    async def replay(self, reason: str | None = None) -> list[str]:
        """Run failed nodes again, and the nodes skipped because of them; returns their names.

        Nodes that lost a race, or were skipped because of one, stay as they are.
        """
        client = await self._client()
        members = replayable(await self.graph())
        for place in range(0, len(members), 500):
            for answer in await client.engine.replay_many(
                [member.execution_id for member in members[place : place + 500]], reason=reason
            ):
                if isinstance(answer, Exception):
                    raise answer
        names = {execution_id: name for name, execution_id in (await self.refresh()).nodes.items()}
        return [names[member.execution_id] for member in members]


def named(member: Member | FlowNode) -> str:
    """The name of a node; its id if it was added without a name."""
    return member.name or str(member.execution_id)


def _revive(flow_id: str, nodes: dict[str, str], is_new: bool, key: str | None, name: str | None) -> FlowRun:
    app = None if key is None else connectors.get(key)
    if app is None and key is not None:
        known: list[Any] = [one for one in connectors.values() if one.name == name]
        app = known[-1] if len({one.address for one in known}) == 1 else None
    found = {node: parse_execution_id(one) for node, one in nodes.items()}
    return FlowRun(FlowId(UUID(flow_id)), nodes=found, connector=app, is_new=is_new)
