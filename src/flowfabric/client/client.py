"""The client: submit, read, wait, cancel, replay, list. `Client` is generated from it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from flowfabric.client import current
from flowfabric.client.budgets import Budgeting
from flowfabric.client.bulk import BulkSubmitting
from flowfabric.client.run import Run
from flowfabric.client.signals import Signalling
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.engine.reads import Place
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, Unavailable
from flowfabric.values.attempt import Cancelled
from flowfabric.values.execution import ExecutionInfo
from flowfabric.values.flow import FlowInfo
from flowfabric.values.ids import ExecutionId, parse_execution_id
from flowfabric.values.lane import LaneState, LaneStats
from flowfabric.values.lease import Operator
from flowfabric.values.options import check_priority, meant
from flowfabric.values.page import Page, everything
from flowfabric.values.schedule import Schedule
from flowfabric.values.state import UNSUCCESSFUL, State
from flowfabric.values.worker import WorkerRecord

_CHUNK = 500  # executions per call when a method goes through many
_CHILD_CHUNKS = 20  # chunks of children that `cancel` cancels itself
_FAILED = (State.FAILED, State.EXPIRED)
_NOT_ENDED = tuple(state for state in State if not state.is_terminal)


class Filters(TypedDict, total=False):
    """The executions that match every filter given."""

    states: Collection[State | str] | None
    lane: str | None
    kind: str | None
    namespace: str | None
    tag: tuple[str, str] | None
    parent: str | ExecutionId | None
    created_from: datetime | None
    created_before: datetime | None


class AsyncClient(Signalling, Budgeting, BulkSubmitting):
    """Everything a program that is not a worker does: `client = await app.client()`."""

    # Lists

    async def flows(
        self, *, namespace: str | None = None, name: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[FlowInfo, str]:
        """One page of flows, newest first; `name` is what `app.flow` was given."""
        return await self.engine.find_flows(namespace=namespace, flow_kind=name, limit=limit, cursor=cursor)

    async def find(
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
        return await self.engine.find_executions(
            states=states,
            lane_ids=None if lane is None else [lane],
            kinds=None if kind is None else [kind],
            namespace=namespace,
            tag=tag,
            parent_id=None if parent is None else parse_execution_id(parent, "parent"),
            created_from=created_from,
            created_before=created_before,
            order_by=order_by,
            limit=limit,
            cursor=cursor,
        )

    async def all(self, **filters: Unpack[Filters]) -> AsyncIterator[ExecutionInfo]:
        """Every execution that `find` would page through."""
        async for page in self._pages(filters):
            for item in page:
                yield item

    async def _pages(self, filters: Filters) -> AsyncIterator[Sequence[ExecutionInfo]]:
        """Pages by time of creation, so that changing the executions of one page does not affect the next."""
        _check_filters(filters)
        cursor: Place | None = None
        while True:
            page = await self.find(**filters, limit=_CHUNK, cursor=cursor)
            if page.items:
                yield page.items
            if page.next_cursor is None:
                return
            cursor = page.next_cursor

    async def failures(
        self, *, limit: int = 50, cursor: Place | None = None, **filters: Unpack[Filters]
    ) -> Page[ExecutionInfo, Place]:
        """Executions that failed or expired; those first that ended last."""
        _check_filters(filters)
        wanted: Filters = {"states": _FAILED, **filters}
        is_ended = UNSUCCESSFUL.issuperset(wanted["states"] or ("",))
        return await self.find(**wanted, order_by="ended" if is_ended else "created", limit=limit, cursor=cursor)

    # Changing

    async def cancel(
        self, execution_id: str | ExecutionId, reason: str = "cancelled by a client", *, keep_children: bool = False
    ) -> None:
        """Cancel an execution, whatever it is doing. Cancelling it again changes nothing.

        Tasks and flows that its handler submitted are cancelled with it, and theirs, unless `keep_children`. If there
        are many, a worker cancels the rest after this call. Children that a task cancels itself stay cancelled
        when that task is replayed.
        """
        target = parse_execution_id(execution_id)
        by = current.handled_id()
        done = await self.engine.cancel(Operator(target), reason, keep_children=keep_children, by=by)
        if done.has_children:
            await self._cancel_children(done)

    async def _cancel_children(self, parent: Cancelled) -> None:
        for _ in range(_CHILD_CHUNKS):
            if not (await self.engine.cancel_children(parent.execution_id)).more:
                break

    async def replay(self, execution_id: str | ExecutionId, *, reason: str | None = None) -> None:
        """Run an ended execution again; finished steps are kept unless it had succeeded."""
        await self.engine.replay_execution(parse_execution_id(execution_id), reason=reason)

    async def fork(
        self,
        execution_id: str | ExecutionId,
        *,
        before: str | tuple[str, int] | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> Run[Any]:
        """Start a new execution with the steps that another one recorded before a step; it runs the rest.

        `before` is the step's name as `flowfabric show` lists it, such as `draft #2`, or the name and how often it was
        used before; None keeps every step. `payload` replaces arguments by name, and the others stay. The other one is
        not changed. `InvalidInput` if the step was never recorded, or an argument does not fit the task.
        """
        target = parse_execution_id(execution_id)
        step = (before, 0) if isinstance(before, str) else before
        if self.codecs.binds:
            raise Unavailable("fork", "the app's codecs bind recorded steps to their execution")
        sealed: tuple[bytes | None, str | None] = (None, None)
        kind = None
        if payload is not None:
            if not isinstance(payload, Mapping):
                raise InvalidInput(f"got {type(payload).__name__}", field="payload", allowed="arguments by name")
            try:
                context = await self.engine.read_execution_context(target)
            except InvalidInput:
                raise NotFound("execution", target) from None
            kind = context.execution_kind
            task = self._task(kind)
            stored = self.codecs.open(context.input_payload, context.payload_encoding, target)
            known: dict[str, msgspec.Raw] = {}
            if stored:
                with contextlib.suppress(msgspec.DecodeError):
                    known = msgspec.json.decode(stored, type=dict[str, msgspec.Raw])
            if known.keys() - task.parameter_names:
                known = {}  # of a node whose arguments are results of others: all must be given
            # Kept arguments are JSON already: as values they would have another type than the task's.
            written = {**known, **task.signature.check(payload, later=known.keys() - payload.keys())}
            data = msgspec.json.encode(written)
            try:
                task.signature.decode(data)
            except CannotDecode as error:
                raise InvalidInput(str(error), field="payload", allowed="arguments that fit the task") from None
            sealed = self.codecs.seal(data, None)
        made = await self.engine.fork_execution(target, before_step=step, payload=sealed[0], payload_encoding=sealed[1])
        return Run(made, kind=kind, connector=self._connector)

    async def fail(self, execution_id: str | ExecutionId, reason: str = "failed by an operator") -> None:
        """Fail for good an execution that runs, or that waits because its code changed; it is not retried.

        Its hooks and its flow see a failure. Tasks and flows that it submitted continue: a replay may want them.
        """
        await self.engine.fail(
            Operator(parse_execution_id(execution_id)), reason, failure_class="permanent", category="operator"
        )

    async def unblock(self, execution_id: str | ExecutionId) -> None:
        """Let workers claim at once an execution that is held back, for example because its code changed."""
        await self.engine.unblock_execution(parse_execution_id(execution_id))

    async def change_priority(self, execution_id: str | ExecutionId, priority: int) -> None:
        """Change the priority of a claimable execution: 0 to 9000, higher ones first."""
        await self.engine.change_priority(parse_execution_id(execution_id), check_priority(priority))

    async def delete(self, execution_id: str | ExecutionId) -> None:
        """Delete an ended execution now."""
        await self.engine.delete_execution(parse_execution_id(execution_id))

    async def redact(self, execution_id: str | ExecutionId) -> None:
        """Remove payloads, results, failure messages, tags, key and reasons of an ended execution; its history stays.

        It cannot be replayed any more. A child that its parent still needs is refused, naming the parent.
        """
        await self.engine.redact_execution(parse_execution_id(execution_id))

    async def cancel_all(
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
        return await self._each_chunk(
            lambda ids: self.engine.cancel_many(ids, reason, keep_children=keep_children),
            progress,
            {"states": _NOT_ENDED, **filters},
        )

    async def replay_all(
        self, reason: str | None = None, *, progress: Callable[[int], object] | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Replay all executions that match the filters and failed or expired; returns how many. See `cancel_all`."""
        return await self._each_chunk(
            lambda ids: self.engine.replay_many(ids, reason=reason), progress, {"states": _FAILED, **filters}
        )

    async def _each_chunk(
        self,
        change: Callable[[list[ExecutionId]], Awaitable[Sequence[object]]],
        progress: Callable[[int], object] | None,
        filters: Filters,
    ) -> int:
        done = 0
        async for page in self._pages(filters):
            verdicts = await change([item.execution_id for item in page])
            # A refusal (it ended meanwhile, or was replayed too often) does not stop the rest.
            done += sum(not isinstance(verdict, FlowFabricError) for verdict in verdicts)
            if progress is not None:
                progress(done)
        return done

    # Workers, lanes and schedules

    async def workers(self) -> list[WorkerRecord]:
        """All workers that are alive, by namespace and instance id, with what they serve."""
        return await everything(lambda after, size: self.engine.list_all_workers(after=after, limit=size))

    async def lanes(self) -> list[LaneStats]:
        """State and counts of every lane."""
        return await self.engine.lane_stats()

    async def set_lane_state(self, lane: str, state: LaneState | str) -> LaneState:
        """Pause, drain, disable or open a lane; returns the previous state."""
        return await self.engine.set_lane_state(lane, state)

    async def schedules(self) -> list[Schedule]:
        """All schedules by name."""
        return await everything(lambda after, size: self.engine.list_schedules(cursor=after, limit=size))

    async def pause_schedule(self, name: str) -> None:
        """Pause a schedule until it is resumed."""
        await self.engine.pause_schedule(name)

    async def resume_schedule(self, name: str) -> None:
        """Resume a schedule. It catches up on missed times as its catch-up setting says."""
        await self.engine.resume_schedule(name)

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule. Executions it has created stay."""
        await self.engine.delete_schedule(name)


def _check_filters(given: Mapping[str, Any]) -> None:
    known = Filters.__annotations__
    for name in given:
        if name not in known:
            near = meant(name, known)
            raise InvalidInput("is not a filter" + (f"; {near}" if near else ""), field=name, allowed=", ".join(known))
