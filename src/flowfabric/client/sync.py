"""The client for programs without an event loop: every call runs on a loop in a background thread.

Generated from the async client by scripts/sync_client.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload
from uuid import UUID

from flowfabric.bridges.callbacks import Received
from flowfabric.client.client import AsyncClient, Filters
from flowfabric.client.connector import Connector, Graph
from flowfabric.client.flow_run import FlowRun, Named
from flowfabric.client.portal import Portal
from flowfabric.client.run import Run
from flowfabric.client.submission import Submittable
from flowfabric.engine.reads import Place
from flowfabric.values.attempt import Attempt
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
from flowfabric.values.schedule import Schedule
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.state import State
from flowfabric.values.step import Step
from flowfabric.values.wait import PendingWaitpoint, Wait
from flowfabric.values.worker import WorkerRecord

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

    def cancel(self, reason: str = "cancelled by its submitter") -> None:
        """Cancel it, whatever it is doing. A running handler is stopped."""
        self._portal.call(self.run.cancel(reason))

    def replay(self, reason: str | None = None) -> None:
        """Run it again from the top; finished steps are kept unless it had succeeded."""
        self._portal.call(self.run.replay(reason))

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
        """Send it a signal; `key` names the waitpoint if it has several."""
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

    def approve(self, key: str | None = None, *, by: str = "") -> Accepted | DuplicateSignal:
        """Send it the signal `approved` as an operator; `by` names who decided."""
        return self._portal.call(self.run.approve(key, by=by))

    def reject(self, key: str | None = None, *, by: str = "") -> Accepted | DuplicateSignal:
        """Send it the signal `rejected` as an operator; `by` names who decided."""
        return self._portal.call(self.run.reject(key, by=by))

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

        Nodes that lost a race, or were skipped because of one, are left out.
        """
        return self._portal.call(self.run.result(timeout))

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
    def submit(self, task: Submittable[R], /, *args: Any, **kwargs: Any) -> SyncRun[R]: ...

    @overload
    def submit(self, task: str, /, *args: Any, **kwargs: Any) -> SyncRun[Any]: ...

    def submit(self, task: Submittable[Any] | str, /, *args: Any, **kwargs: Any) -> SyncRun[Any]:
        """Submit a task, by object or by name. Keywords that are not parameters of the task are options."""
        return SyncRun(self._portal, self._portal.call(self._client.submit(task, *args, **kwargs)))

    def submit_flow(self, flow: Graph, *, idempotency_key: str | None = None) -> SyncFlowRun:
        """Submit a flow that was built with `app.flow()`, in one call. See `Flow.submit`."""
        return SyncFlowRun(
            self._portal, self._portal.call(self._client.submit_flow(flow, idempotency_key=idempotency_key))
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
        """Send a signal to an execution; `key` names the waitpoint if it has several."""
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
        self, execution_id: str | ExecutionId, key: str | None = None, *, by: str = ""
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `approved` as an operator; `by` names who decided."""
        return self._portal.call(self._client.approve(execution_id, key, by=by))

    def reject(
        self, execution_id: str | ExecutionId, key: str | None = None, *, by: str = ""
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `rejected` as an operator; `by` names who decided."""
        return self._portal.call(self._client.reject(execution_id, key, by=by))

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
        created_from: datetime | None = None,
        created_before: datetime | None = None,
        limit: int = 50,
        cursor: Place | None = None,
    ) -> Page[ExecutionInfo, Place]:
        """One page of executions, newest first. A page may have fewer than `limit` although `next_cursor` is set."""
        return self._portal.call(
            self._client.find(
                states=states,
                lane=lane,
                kind=kind,
                namespace=namespace,
                tag=tag,
                created_from=created_from,
                created_before=created_before,
                limit=limit,
                cursor=cursor,
            )
        )

    def all(self, **filters: Unpack[Filters]) -> Iterator[ExecutionInfo]:
        """Every execution that `find` would page through."""
        yield from self._portal.iterate(self._client.all(**filters))

    def failures(
        self, *, limit: int = 50, cursor: Place | None = None, **filters: Unpack[Filters]
    ) -> Page[ExecutionInfo, Place]:
        """Executions that failed or expired, newest first."""
        return self._portal.call(self._client.failures(limit=limit, cursor=cursor, **filters))

    def cancel(self, execution_id: str | ExecutionId, reason: str = "cancelled by a client") -> None:
        """Cancel an execution, whatever it is doing. Cancelling it again changes nothing."""
        self._portal.call(self._client.cancel(execution_id, reason))

    def replay(self, execution_id: str | ExecutionId, *, reason: str | None = None) -> None:
        """Run an ended execution again; finished steps are kept unless it had succeeded."""
        self._portal.call(self._client.replay(execution_id, reason=reason))

    def change_priority(self, execution_id: str | ExecutionId, priority: int) -> None:
        """Change the priority of a claimable execution."""
        self._portal.call(self._client.change_priority(execution_id, priority))

    def delete(self, execution_id: str | ExecutionId) -> None:
        """Delete an ended execution now."""
        self._portal.call(self._client.delete(execution_id))

    def redact(self, execution_id: str | ExecutionId) -> None:
        """Remove payloads, results and failure messages of an ended execution; its history stays."""
        self._portal.call(self._client.redact(execution_id))

    def cancel_all(
        self, reason: str, *, progress: Callable[[int], object] | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Cancel all executions that match the filters and have not ended; returns how many.

        Works in chunks and calls `progress` after each with the number so far.
        """
        return self._portal.call(self._client.cancel_all(reason, progress=progress, **filters))

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
