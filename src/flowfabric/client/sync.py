"""The client for programs without an event loop: every call runs on a loop in a background thread.

Generated from the async client by scripts/sync_client.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload
from uuid import UUID

from flowfabric.bridges.callbacks import Received
from flowfabric.client.client import AsyncClient, Filters
from flowfabric.client.connector import Connector, Graph
from flowfabric.client.flow_run import FlowRun, Named
from flowfabric.client.following import SyncStreamReader
from flowfabric.client.portal import Portal
from flowfabric.client.run import Run
from flowfabric.client.submission import Submittable, TypedTask
from flowfabric.engine.reads import Place
from flowfabric.values.attempt import Attempt
from flowfabric.values.budget import BudgetReset, BudgetStatus, ReportAnswer
from flowfabric.values.child import Child
from flowfabric.values.durations import Duration
from flowfabric.values.execution import Execution, ExecutionInfo, Outcome
from flowfabric.values.flow import (
    CancellationPolicy,
    CancellationScheduled,
    FlowCancelled,
    FlowGraph,
    FlowInfo,
    FlowSnapshot,
    FlowSummary,
    PartiallyCancelled,
)
from flowfabric.values.found import FoundId, What
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.lane import LaneState, LaneStats
from flowfabric.values.options import OptionNames
from flowfabric.values.page import Page
from flowfabric.values.quota import QuotaPolicy
from flowfabric.values.schedule import Schedule
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.spending import FlowUsage, Mode, RunUsage
from flowfabric.values.state import State
from flowfabric.values.step import Step
from flowfabric.values.stream import Summary
from flowfabric.values.wait import PendingWaitpoint, Wait
from flowfabric.values.worker import WorkerRecord

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class SyncRun(Generic[R_co]):
    """One execution of a task, as the sync client returns it. Unpickled it is a `Run`, for `client.run(...)`."""

    __slots__ = ("_portal", "run")

    def __init__(self, portal: Portal, run: Run[R_co]) -> None:
        self._portal = portal
        self.run = run

    @property
    def execution_id(self) -> ExecutionId:
        return self.run.execution_id

    @property
    def id(self) -> str:
        """The execution's id, as plain text."""
        return self.run.id

    @property
    def kind(self) -> str | None:
        return self.run.kind

    @property
    def is_new(self) -> bool:
        return self.run.is_new

    def __repr__(self) -> str:
        return f"Sync{self.run!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyncRun) and other.run == self.run

    def __hash__(self) -> int:
        return hash(self.run)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.run.__reduce__()

    def result(self, timeout: Duration | None = None) -> R_co:
        """Wait for the task's result. `TaskFailed` if it did not succeed, `TimedOut` if it did not end in time.

        Inside a task the wait is durable: it holds no worker, and its outcome is recorded.
        """
        return self._portal.call(self.run.result(timeout))

    def outcome(self, timeout: Duration | None = None) -> Outcome:
        """Wait until the execution ends and return how; does not raise for a failure."""
        return self._portal.call(self.run.outcome(timeout))

    def get(self) -> Execution:
        """Read everything about it except payload and result; `NotFound` if it does not exist."""
        return self._portal.call(self.run.get())

    def state(self) -> State:
        """Its current state."""
        return self._portal.call(self.run.state())

    def steps(self) -> list[Step]:
        """The recorded steps of its handler."""
        return self._portal.call(self.run.steps())

    def attempts(self) -> list[Attempt]:
        """All its attempts, oldest first."""
        return self._portal.call(self.run.attempts())

    def stream(
        self,
        *,
        after: str | None = None,
        attempt: int | None = None,
        live: bool = True,
        keep_alive: Duration | None = None,
        timeout: Duration | None = None,
    ) -> SyncStreamReader:
        """Follow what its handler emits, from the beginning or from after the `cursor` of an item.

        Yields each `Frame` that was emitted, a `NewAttempt` where a retry or another worker begins again, and a `Gap`
        where frames are no longer kept. It ends when the execution has ended and everything was read. `attempt`
        follows one attempt only, counted from 0; `live=False` leaves out best-effort frames; `keep_alive` yields a
        `KeepAlive` after that much silence. `TimedOut` after `timeout`.
        """
        return SyncStreamReader(
            self._portal,
            self.run.stream(after=after, attempt=attempt, live=live, keep_alive=keep_alive, timeout=timeout),
        )

    def summary(self, *, attempt: int | None = None) -> Summary | None:
        """The document its handler made with `ctx.summarize`, of the latest attempt; None if there is none."""
        return self._portal.call(self.run.summary(attempt=attempt))

    def usage(self) -> RunUsage:
        """Return what it and all that it submitted used and hold: in all, by budget and by execution."""
        return self._portal.call(self.run.usage())

    def budget(self) -> BudgetStatus | None:
        """Its own budget (`ff.Budget`) with what is used and held of it; None if it was submitted without."""
        return self._portal.call(self.run.budget())

    def raise_budget(self, amounts: Mapping[str, int] | None = None, /, **dimensions: int) -> BudgetStatus:
        """Add to its own budget, or take away with a negative amount; what waits for it continues if there is room."""
        return self._portal.call(self.run.raise_budget(amounts, **dimensions))

    def parent(self) -> SyncRun[Any] | None:
        """The execution whose handler submitted it; None if none did, or it was detached."""
        found = self._portal.call(self.run.parent())
        return None if found is None else SyncRun(self._portal, found)

    def children(self) -> list[Child]:
        """The tasks and flows that its handler submitted, in the order of creation, up to 10,000."""
        return self._portal.call(self.run.children())

    def cancel(self, reason: str = "cancelled by its submitter", *, keep_children: bool = False) -> None:
        """Cancel it, whatever it is doing. A running handler is stopped; what it submitted is cancelled too."""
        self._portal.call(self.run.cancel(reason, keep_children=keep_children))

    def replay(self, reason: str | None = None) -> None:
        """Run it again from the top; finished steps are kept unless it had succeeded."""
        self._portal.call(self.run.replay(reason))

    def fork(
        self, *, before: str | tuple[str, int] | None = None, payload: Mapping[str, Any] | None = None
    ) -> SyncRun[R_co]:
        """Start a new execution that has the steps recorded before one, and runs the rest. See `client.fork`."""
        return SyncRun(self._portal, self._portal.call(self.run.fork(before=before, payload=payload)))

    def waits(self) -> list[PendingWaitpoint]:
        """The waitpoints at which it can be signalled now."""
        return self._portal.call(self.run.waits())

    def signal(
        self,
        key: str | None = None,
        name: str = "signal",
        payload: Any = None,
        *,
        source_type: str = "client",
        source_identity: str = "",
        idempotency_key: str | None = None,
    ) -> Accepted | DuplicateSignal:
        """Send it a signal; `key` names the waitpoint if it has several.

        `PayloadRefused` if the payload does not fit the type that the task waits for.
        """
        return self._portal.call(
            self.run.signal(
                key,
                name,
                payload,
                source_type=source_type,
                source_identity=source_identity,
                idempotency_key=idempotency_key,
            )
        )

    def approve(self, key: str | None = None, *, by: str = "", payload: Any = None) -> Accepted | DuplicateSignal:
        """Send it the signal `approved` as an operator; `by` names who decided. See `signal`."""
        return self._portal.call(self.run.approve(key, by=by, payload=payload))

    def reject(
        self, key: str | None = None, *, by: str = "", payload: Any = None, reason: str | None = None
    ) -> Accepted | DuplicateSignal:
        """Send it the signal `rejected` as an operator; `by` names who decided. See `signal`.

        `reason` is the field `reason` of the payload.
        """
        return self._portal.call(self.run.reject(key, by=by, payload=payload, reason=reason))

    def resume(self, delay: Duration = 0) -> None:
        """Resume it without a signal, whatever it waits for."""
        self._portal.call(self.run.resume(delay))


class SyncFlowRun:
    """One flow, as the sync client returns it. Unpickled it is a `FlowRun`, for `client.flow(...)`."""

    __slots__ = ("_portal", "run")

    def __init__(self, portal: Portal, run: FlowRun) -> None:
        self._portal = portal
        self.run = run

    @property
    def flow_id(self) -> FlowId:
        return self.run.flow_id

    @property
    def id(self) -> str:
        """The flow's id, as plain text."""
        return self.run.id

    @property
    def nodes(self) -> dict[str, ExecutionId]:
        """The executions by the names of their nodes."""
        return self.run.nodes

    @property
    def is_new(self) -> bool:
        return self.run.is_new

    @overload
    def __getitem__(self, node: str) -> SyncRun[Any]: ...
    @overload
    def __getitem__(self, node: Named[R]) -> SyncRun[R]: ...
    def __getitem__(self, node: str | Named[Any]) -> SyncRun[Any]:
        """A handle on one node, by name or by the node that `flow.add` returned."""
        return SyncRun(self._portal, self.run[node])

    def __repr__(self) -> str:
        return f"Sync{self.run!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyncFlowRun) and other.run == self.run

    def __hash__(self) -> int:
        return hash(self.run)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.run.__reduce__()

    def refresh(self) -> SyncFlowRun:
        """Read the nodes again, including those added since."""
        return SyncFlowRun(self._portal, self._portal.call(self.run.refresh()))

    def usage(self) -> FlowUsage:
        """Return what its nodes and all they submitted used and hold: in all, by budget, by node and by execution."""
        return self._portal.call(self.run.usage())

    def budget(self) -> BudgetStatus | None:
        """Its own budget (`ff.Budget`) with what is used and held of it; None if it was submitted without."""
        return self._portal.call(self.run.budget())

    def raise_budget(self, amounts: Mapping[str, int] | None = None, /, **dimensions: int) -> BudgetStatus:
        """Add to its own budget, or take away with a negative amount; what waits for it continues if there is room."""
        return self._portal.call(self.run.raise_budget(amounts, **dimensions))

    def wait(self, timeout: Duration | None = None) -> None:
        """Wait until every node has ended, also those added meanwhile. `TimedOut` if that takes too long.

        Inside a task the wait is durable: it holds no worker.
        """
        self._portal.call(self.run.wait(timeout))

    def live(self) -> list[ExecutionId]:
        """Members that have not ended, in the order of creation: the last ones mostly depend on the others."""
        return self._portal.call(self.run.live())

    def result(self, timeout: Duration | None = None) -> dict[str, Any]:
        """Wait until all nodes have ended and return their results by name. `FlowFailed` names the failed nodes.

        Nodes that lost a race, or were skipped because of one, are left out. Inside a task the wait is durable, and the
        results are recorded.
        """
        return self._portal.call(self.run.result(timeout))

    def stream(
        self,
        *,
        after: str | Mapping[str, str] | None = None,
        live: bool = True,
        keep_alive: Duration | None = None,
        timeout: Duration | None = None,
    ) -> SyncStreamReader:
        """Follow what all its nodes emit; each item has its `node`. It ends when all nodes have ended.

        `after` is the `cursor` of an earlier reader, or has the cursor of an item of each node, by name. See
        `Run.stream`.
        """
        return SyncStreamReader(
            self._portal, self.run.stream(after=after, live=live, keep_alive=keep_alive, timeout=timeout)
        )

    def states(self) -> dict[str, State]:
        """The states of its nodes, by name."""
        return self._portal.call(self.run.states())

    def get(self) -> FlowSnapshot:
        """Its header and joins; `NotFound` if it does not exist."""
        return self._portal.call(self.run.get())

    def graph(self) -> FlowGraph:
        """Its nodes and edges, for drawing: see `flowfabric.drawing`."""
        return self._portal.call(self.run.graph())

    def summary(self) -> FlowSummary:
        """The number of nodes in each state, and the flow's own state."""
        return self._portal.call(self.run.summary())

    def cancel(
        self,
        reason: str = "cancelled by its submitter",
        *,
        policy: CancellationPolicy | str = CancellationPolicy.CANCEL_ALL,
        wait: bool = True,
    ) -> FlowCancelled | CancellationScheduled | PartiallyCancelled:
        """Close it and cancel its nodes: all, only those not running yet (`cancel_pending`), or none (`flow_only`)."""
        return self._portal.call(self.run.cancel(reason, policy=policy, wait=wait))

    def replay(self, reason: str | None = None) -> list[str]:
        """Run failed nodes again, and the nodes skipped because of them; returns their names.

        Nodes that lost a race, or were skipped because of one, stay as they are.
        """
        return self._portal.call(self.run.replay(reason))


class Client:
    """Everything a program that is not a worker does: `with ff.Client(app) as client: ...`.

    Any number of threads may share one. An interrupted call is cancelled. After a fork, open another. It keeps a thread
    and connections until it is closed.
    """

    def __init__(self, app: Connector) -> None:
        self._portal = Portal()
        try:
            self._client: AsyncClient = self._portal.call(app.client())
        except BaseException:
            self._portal.close()
            raise

    def close(self) -> None:
        """Cancel running calls and close the connections. Closing again changes nothing."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, execution_id: str | ExecutionId | Run[Any] | SyncRun[Any], *, kind: str | None = None
    ) -> SyncRun[Any]:
        """A handle on an execution from its id (or from a handle of another process or client)."""
        known = execution_id.run if isinstance(execution_id, SyncRun) else execution_id
        return SyncRun(self._portal, self._client.run(known, kind=kind))

    def flow(self, flow_id: str | UUID | FlowRun | SyncFlowRun) -> SyncFlowRun:
        """A handle on a flow from its id (or from a handle of another process or client)."""
        known = flow_id.run if isinstance(flow_id, SyncFlowRun) else flow_id
        return SyncFlowRun(self._portal, self._client.flow(known))

    def find_id(self, text: str, *, what: What | None = None, limit: int = 10) -> list[FoundId]:
        """Executions and flows whose id ends or begins with at least 6 hex digits, newest first."""
        return self._portal.call(self._client.find_id(text, what=what, limit=limit))

    def get(self, execution_id: str | ExecutionId) -> Execution:
        """Read everything about an execution except payload and result; `NotFound` if it does not exist."""
        return self._portal.call(self._client.get(execution_id))

    @overload
    def submit(self, task: TypedTask[P, R], /, *args: P.args, **kwargs: P.kwargs) -> SyncRun[R]: ...

    @overload
    def submit(self, task: str, /, *args: Any, **kwargs: Any) -> SyncRun[Any]: ...

    def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> SyncRun[Any]:
        """Submit a task, by object or by name.

        Keywords that are not parameters of the task are options; `task.options(...)` gives them in a way that type
        checkers follow.
        """
        return SyncRun(self._portal, self._portal.call(self._client.submit(task, *args, **kwargs)))

    def submit_flow(self, flow: Graph, *, idempotency_key: str | None = None, detached: bool = False) -> SyncFlowRun:
        """Submit a flow that was built with `app.flow()`, in one call. See `Flow.submit`."""
        return SyncFlowRun(
            self._portal,
            self._portal.call(self._client.submit_flow(flow, idempotency_key=idempotency_key, detached=detached)),
        )

    @overload
    def submit_many(
        self, task: Submittable[R], arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[SyncRun[R]]: ...

    @overload
    def submit_many(
        self, task: str, arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[SyncRun[Any]]: ...

    def submit_many(
        self, task: Submittable[Any] | str, arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[SyncRun[Any]]:
        """Submit a task once per item of `arguments`, up to a thousand to a call.

        A tuple holds the arguments of one submission, anything else is its only argument; items made with
        `task.submission(...)` are used unchanged, with their own options. If any argument is wrong, nothing is stored.

        With a middleware around submissions they are sent one by one. If it refuses one, those before are stored and
        their handles lost: use `RateLimit(wait=True)` here.
        """
        return [
            SyncRun(self._portal, run)
            for run in self._portal.call(self._client.submit_many(task, arguments, **options))
        ]

    def budgets(self, prefix: str = "", *, exhausted: bool | None = None) -> list[BudgetStatus]:
        """All budgets whose name begins with `prefix`, by name, with what is used, held and allowed.

        Those of single runs are among them: `owner_id` says whose.
        """
        return self._portal.call(self._client.budgets(prefix, exhausted=exhausted))

    def budget(self, name: str) -> BudgetStatus:
        """One budget by name; `NotFound` if there is none."""
        return self._portal.call(self._client.budget(name))

    def create_budget(
        self,
        name: str,
        *,
        hard: Mapping[str, int] | None = None,
        soft: Mapping[str, int] | None = None,
        every: Duration | None = None,
        mode: Mode = "strict",
    ) -> BudgetStatus:
        """Create a budget, as `app.budget` declares one. One of this name that exists is returned unchanged."""
        return self._portal.call(self._client.create_budget(name, hard=hard, soft=soft, every=every, mode=mode))

    def raise_budget(self, name: str, amounts: Mapping[str, int] | None = None, /, **dimensions: int) -> BudgetStatus:
        """Add to hard limits, or take away with a negative amount; executions that there is room for continue."""
        return self._portal.call(self._client.raise_budget(name, amounts, **dimensions))

    def set_budget(
        self,
        name: str,
        *,
        hard: Mapping[str, int] | None = None,
        soft: Mapping[str, int] | None = None,
        every: Duration | None = None,
        mode: Mode | None = None,
    ) -> BudgetStatus:
        """Set limits (0: none) and leave the others as they are. `every=0` ends periodic resets."""
        return self._portal.call(self._client.set_budget(name, hard=hard, soft=soft, every=every, mode=mode))

    def reset_budget(self, name: str) -> BudgetReset:
        """Begin a new period now: usage is 0, and what is held stays held."""
        return self._portal.call(self._client.reset_budget(name))

    def record_spend(
        self,
        name: str,
        execution_id: str | ExecutionId,
        amounts: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
    ) -> ReportAnswer:
        """Count what an execution cost, without a lease, and enter it in the ledger: `release_budget` takes it back."""
        return self._portal.call(
            self._client.record_spend(name, execution_id, amounts, idempotency_key=idempotency_key)
        )

    def release_budget(self, name: str, execution_id: str | ExecutionId) -> None:
        """Take what the ledger has for an execution in this period off the usage."""
        self._portal.call(self._client.release_budget(name, execution_id))

    def usage(self, execution_id: str | ExecutionId) -> RunUsage:
        """Return what an execution and all that it submitted used and hold: in all, by budget and by execution."""
        return self._portal.call(self._client.usage(execution_id))

    def quotas(self, prefix: str = "") -> list[QuotaPolicy]:
        """All quotas whose name begins with `prefix`, by name, with how full they are and how many wait."""
        return self._portal.call(self._client.quotas(prefix))

    def quota(self, name: str) -> QuotaPolicy:
        """One quota by name; `NotFound` if there is none."""
        return self._portal.call(self._client.quota(name))

    def create_quota(
        self,
        name: str,
        *,
        concurrent: int = 0,
        per_window: int = 0,
        window: Duration = 60,
        key: str | None = None,
        jitter: Duration = 0,
    ) -> QuotaPolicy:
        """Create a quota, as `app.quota` declares one. One of this name that exists is returned unchanged."""
        return self._portal.call(
            self._client.create_quota(
                name, concurrent=concurrent, per_window=per_window, window=window, key=key, jitter=jitter
            )
        )

    def set_quota(
        self,
        name: str,
        *,
        concurrent: int | None = None,
        per_window: int | None = None,
        window: Duration | None = None,
        jitter: Duration | None = None,
    ) -> QuotaPolicy:
        """Change numbers of a quota (0: no such limit); executions that there is room for become claimable."""
        return self._portal.call(
            self._client.set_quota(name, concurrent=concurrent, per_window=per_window, window=window, jitter=jitter)
        )

    def waits(
        self,
        *,
        lane: str | None = None,
        namespace: str | None = None,
        key: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Wait, str]:
        """One page of the waitpoints that can be signalled, of all executions, longest waiting first."""
        return self._portal.call(
            self._client.waits(lane=lane, namespace=namespace, key=key, limit=limit, cursor=cursor)
        )

    def waitpoints_of(self, execution_id: str | ExecutionId) -> list[PendingWaitpoint]:
        """The waitpoints of an execution that can be signalled now."""
        return self._portal.call(self._client.waitpoints_of(execution_id))

    def signal(
        self,
        execution_id: str | ExecutionId,
        key: str | None = None,
        name: str = "signal",
        payload: Any = None,
        *,
        source_type: str = "client",
        source_identity: str = "",
        idempotency_key: str | None = None,
    ) -> Accepted | DuplicateSignal:
        """Send a signal to an execution; `key` names the waitpoint if it has several.

        `PayloadRefused` if the payload does not fit the type that the task waits for.
        """
        return self._portal.call(
            self._client.signal(
                execution_id,
                key,
                name,
                payload,
                source_type=source_type,
                source_identity=source_identity,
                idempotency_key=idempotency_key,
            )
        )

    def approve(
        self, execution_id: str | ExecutionId, key: str | None = None, *, by: str = "", payload: Any = None
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `approved` as an operator; `by` names who decided. See `signal`."""
        return self._portal.call(self._client.approve(execution_id, key, by=by, payload=payload))

    def reject(
        self,
        execution_id: str | ExecutionId,
        key: str | None = None,
        *,
        by: str = "",
        payload: Any = None,
        reason: str | None = None,
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `rejected` as an operator; `by` names who decided. See `signal`.

        `reason` is the field `reason` of the payload.
        """
        return self._portal.call(self._client.reject(execution_id, key, by=by, payload=payload, reason=reason))

    def resume(self, execution_id: str | ExecutionId, delay: Duration = 0) -> None:
        """Resume a suspended execution without a signal, whatever it waits for."""
        self._portal.call(self._client.resume(execution_id, delay))

    def receive(
        self,
        callback: str,
        body: bytes = b"",
        *,
        name: str = "callback",
        source_type: str = "callback",
        source_identity: str = "",
        idempotency_key: str | None = None,
    ) -> Received:
        """Handle a web callback: `callback` is the text of the link, `body` the request's body (JSON).

        Never raises for errors of the sender: `Received` has the HTTP status and body of the response.
        """
        return self._portal.call(
            self._client.receive(
                callback,
                body,
                name=name,
                source_type=source_type,
                source_identity=source_identity,
                idempotency_key=idempotency_key,
            )
        )

    def look(self, callback: str) -> PendingWaitpoint | None:
        """The waitpoint that a callback's link signals, or None if the link is invalid or has expired."""
        return self._portal.call(self._client.look(callback))

    def flows(
        self, *, namespace: str | None = None, name: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[FlowInfo, str]:
        """One page of flows, newest first; `name` is what `app.flow` was given."""
        return self._portal.call(self._client.flows(namespace=namespace, name=name, limit=limit, cursor=cursor))

    def find(
        self,
        *,
        states: Collection[State | str] | None = None,
        lane: str | None = None,
        kind: str | None = None,
        namespace: str | None = None,
        tag: tuple[str, str] | None = None,
        parent: str | ExecutionId | None = None,
        created_from: datetime | None = None,
        created_before: datetime | None = None,
        order_by: Literal["created", "ended"] = "created",
        limit: int = 50,
        cursor: Place | None = None,
    ) -> Page[ExecutionInfo, Place]:
        """One page of executions, newest first. A page may have fewer than `limit` although `next_cursor` is set.

        `parent`: only tasks that the handler of this execution submitted; `run.children()` has its flows too.
        `order_by="ended"`: those first that ended last, of states other than `completed`.
        """
        return self._portal.call(
            self._client.find(
                states=states,
                lane=lane,
                kind=kind,
                namespace=namespace,
                tag=tag,
                parent=parent,
                created_from=created_from,
                created_before=created_before,
                order_by=order_by,
                limit=limit,
                cursor=cursor,
            )
        )

    def all(self, **filters: Unpack[Filters]) -> Iterator[ExecutionInfo]:
        """Every execution that `find` would page through."""
        return self._portal.iterate(self._client.all(**filters))

    def failures(
        self, *, limit: int = 50, cursor: Place | None = None, **filters: Unpack[Filters]
    ) -> Page[ExecutionInfo, Place]:
        """Executions that failed or expired; those first that ended last."""
        return self._portal.call(self._client.failures(limit=limit, cursor=cursor, **filters))

    def cancel(
        self, execution_id: str | ExecutionId, reason: str = "cancelled by a client", *, keep_children: bool = False
    ) -> None:
        """Cancel an execution, whatever it is doing. Cancelling it again changes nothing.

        Tasks and flows that its handler submitted are cancelled with it, and theirs, unless `keep_children`. If there
        are many, a worker cancels the rest after this call. Children that a task cancels itself stay cancelled
        when that task is replayed.
        """
        self._portal.call(self._client.cancel(execution_id, reason, keep_children=keep_children))

    def replay(self, execution_id: str | ExecutionId, *, reason: str | None = None) -> None:
        """Run an ended execution again; finished steps are kept unless it had succeeded."""
        self._portal.call(self._client.replay(execution_id, reason=reason))

    def fork(
        self,
        execution_id: str | ExecutionId,
        *,
        before: str | tuple[str, int] | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> SyncRun[Any]:
        """Start a new execution with the steps that another one recorded before a step; it runs the rest.

        `before` is the step's name as `flowfabric show` lists it, such as `draft #2`, or the name and how often it was
        used before; None keeps every step. `payload` replaces arguments by name, and the others stay. The other one is
        not changed. `InvalidInput` if the step was never recorded, or an argument does not fit the task.
        """
        return SyncRun(self._portal, self._portal.call(self._client.fork(execution_id, before=before, payload=payload)))

    def fail(self, execution_id: str | ExecutionId, reason: str = "failed by an operator") -> None:
        """Fail for good an execution that runs, or that waits because its code changed; it is not retried.

        Its hooks and its flow see a failure. Tasks and flows that it submitted continue: a replay may want them.
        """
        self._portal.call(self._client.fail(execution_id, reason))

    def unblock(self, execution_id: str | ExecutionId) -> None:
        """Let workers claim at once an execution that is held back, for example because its code changed."""
        self._portal.call(self._client.unblock(execution_id))

    def change_priority(self, execution_id: str | ExecutionId, priority: int) -> None:
        """Change the priority of a claimable execution: 0 to 9000, higher ones first."""
        self._portal.call(self._client.change_priority(execution_id, priority))

    def delete(self, execution_id: str | ExecutionId) -> None:
        """Delete an ended execution now."""
        self._portal.call(self._client.delete(execution_id))

    def redact(self, execution_id: str | ExecutionId) -> None:
        """Remove payloads, results, failure messages, tags, key and reasons of an ended execution; its history stays.

        It cannot be replayed any more. A child that its parent still needs is refused, naming the parent.
        """
        self._portal.call(self._client.redact(execution_id))

    def cancel_all(
        self,
        reason: str,
        *,
        progress: Callable[[int], object] | None = None,
        keep_children: bool = False,
        **filters: Unpack[Filters],
    ) -> int:
        """Cancel all executions that match the filters and have not ended; returns how many.

        Works in chunks and calls `progress` after each with the number so far. Workers cancel what they submitted.
        """
        return self._portal.call(
            self._client.cancel_all(reason, progress=progress, keep_children=keep_children, **filters)
        )

    def replay_all(
        self, reason: str | None = None, *, progress: Callable[[int], object] | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Replay all executions that match the filters and failed or expired; returns how many. See `cancel_all`."""
        return self._portal.call(self._client.replay_all(reason, progress=progress, **filters))

    def workers(self) -> list[WorkerRecord]:
        """All workers that are alive, by namespace and instance id, with what they serve."""
        return self._portal.call(self._client.workers())

    def lanes(self) -> list[LaneStats]:
        """State and counts of every lane."""
        return self._portal.call(self._client.lanes())

    def set_lane_state(self, lane: str, state: LaneState | str) -> LaneState:
        """Pause, drain, disable or open a lane; returns the previous state."""
        return self._portal.call(self._client.set_lane_state(lane, state))

    def schedules(self) -> list[Schedule]:
        """All schedules by name."""
        return self._portal.call(self._client.schedules())

    def pause_schedule(self, name: str) -> None:
        """Pause a schedule until it is resumed."""
        self._portal.call(self._client.pause_schedule(name))

    def resume_schedule(self, name: str) -> None:
        """Resume a schedule. It catches up on missed times as its catch-up setting says."""
        self._portal.call(self._client.resume_schedule(name))

    def delete_schedule(self, name: str) -> None:
        """Delete a schedule. Executions it has created stay."""
        self._portal.call(self._client.delete_schedule(name))
