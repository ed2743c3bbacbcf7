"""The client: submit, look, wait, cancel, replay, list. `Client` is generated from this one."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, overload
from uuid import UUID, uuid5

from flowfabric.bridges.callbacks import Received, receive
from flowfabric.client import current
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.outcomes import Outcomes
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, Submittable, check_task
from flowfabric.contracts.codecs import Codecs
from flowfabric.contracts.value_types import ValueType
from flowfabric.contracts.waits import encode_payload
from flowfabric.engine import Engine
from flowfabric.engine.calls import MAX_PAYLOAD
from flowfabric.engine.reads import Place
from flowfabric.errors import Conflict, FlowFabricError, InvalidInput, NotFound, StateError
from flowfabric.middleware import Middleware, chain_submit, overriding
from flowfabric.values.callback import parse_callback
from flowfabric.values.durations import Duration, duration
from flowfabric.values.execution import Created, Duplicate, Execution, ExecutionInfo, NewExecution
from flowfabric.values.flow import FlowInfo
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import ExecutionId, FlowId, PartitionKey, mint_uuid, parse_uuid
from flowfabric.values.lane import LaneState, LaneStats
from flowfabric.values.lease import Operator
from flowfabric.values.options import OPTION_NAMES, OptionNames, Options, meant
from flowfabric.values.page import Page
from flowfabric.values.schedule import Schedule
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.state import State
from flowfabric.values.wait import PendingWaitpoint, Wait, common_key

R = TypeVar("R")
T = TypeVar("T")
_ANYTHING = ValueType.of(Any)
_CHUNK = 500  # executions per call of what goes through all of them
_LINES = 2  # calls at a time for one `submit_many`
_MOST = 1000  # of create_many
_MOST_BYTES = 1 << 25  # of payload in one call, unless one alone has more


class Filters(TypedDict, total=False):
    """Which executions: those that match everything given."""

    states: Collection[State | str] | None
    lane: str | None
    kind: str | None
    namespace: str | None
    tag: tuple[str, str] | None
    created_from: datetime | None
    created_before: datetime | None


class Connector(Protocol):
    """Whoever knows the tasks and the way to a client: an app."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def address(self) -> tuple[str | None, str | None]: ...

    @property
    def codecs(self) -> Codecs: ...

    @property
    def middleware(self) -> Sequence[Middleware]: ...

    @property
    def tasks(self) -> Mapping[str, Submittable[Any]]: ...

    async def client(self) -> AsyncClient: ...


class Graph(Protocol):
    """A flow that was built: what `app.flow()` makes."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str: ...

    @property
    def tags(self) -> Mapping[str, str]: ...

    @property
    def grows(self) -> FlowId | None: ...

    def id_of(self, key: str) -> FlowId: ...

    def submissions(self) -> dict[str, Submission]: ...

    def ids(self, flow_id: FlowId, partitions: int, seed: UUID | None = None) -> dict[str, ExecutionId]: ...

    def build(
        self, ids: Mapping[str, ExecutionId], changed: Mapping[str, Submission] | None = None
    ) -> list[NewNode]: ...


class AsyncClient:
    """Everything a program that is not a worker does: `client = await app.client()`."""

    def __init__(self, engine: Engine, connector: Connector) -> None:
        self.engine = engine
        self.outcomes = Outcomes(engine)
        self._connector = connector

    @property
    def codecs(self) -> Codecs:
        """Those of the app."""
        return self._connector.codecs

    async def close(self) -> None:
        """Stop waiting and close the connections."""
        await self.outcomes.close()
        await self.engine.close()

    def result_type(self, kind: str | None) -> ValueType:
        """How the result of a kind is read: by its task's annotation, where the task is known here."""
        task = None if kind is None else self._connector.tasks.get(kind)
        return _ANYTHING if task is None else task.signature.result

    # Submitting

    @overload
    async def submit(self, task: Submittable[R], /, *args: Any, **kwargs: Any) -> Run[R]: ...
    @overload
    async def submit(self, task: str, /, *args: Any, **kwargs: Any) -> Run[Any]: ...
    async def submit(self, task: Submittable[Any] | str, /, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit a task, by object or by name. Keywords that are options and no parameters of the task are options."""
        return await self.send(new_submission(self._task(task), args, kwargs))

    async def send(self, submission: Submission) -> Run[Any]:
        """Submit what `submission` says, through the middleware."""
        scope = current.scope_of(self._connector)
        if scope is not None:
            made = await scope.submit_durably(submission, self._around)
            return self.run(made) if isinstance(made, Run) else made  # a middleware may answer something of its own
        return await self._around(self._send)(submission)

    def _around(
        self, final: Callable[[Submission], Awaitable[Run[Any]]]
    ) -> Callable[[Submission], Awaitable[Run[Any]]]:
        return chain_submit(self._connector.middleware, final)

    async def _send(self, submission: Submission) -> Run[Any]:
        return self._made(submission, await self.create(submission.item(), submission.options))

    def _made(self, submission: Submission, verdict: Created | Duplicate) -> Run[Any]:
        is_new = isinstance(verdict, Created)
        return Run(verdict.execution_id, kind=submission.kind, connector=self._connector, is_new=is_new)

    async def create(self, item: NewExecution, options: Options) -> Created | Duplicate:
        """Create one execution, doing with a known key what the options say."""
        while True:
            verdict = (await self.engine.create_many([item]))[0]
            if isinstance(verdict, FlowFabricError):
                raise verdict
            if isinstance(verdict, Created):
                return verdict
            await self._check_kind(verdict, item.execution_kind)
            if not await self._is_free(verdict, options):
                return verdict

    async def _check_kind(self, standing: Duplicate, kind: str) -> None:
        # A key belongs to its namespace, not to the task: what another task made of it is not what is asked for.
        found = await self.engine.read_execution_info(standing.execution_id)
        if found is not None and found.execution_kind != kind:
            raise _key_is_known(standing, f" of {found.execution_kind}")

    async def _is_free(self, standing: Duplicate, options: Options) -> bool:
        """Whether a known key may be used again; not when its execution stands."""
        if options.on_duplicate == "raise":
            raise _key_is_known(standing)
        return options.on_duplicate == "replace" and await self.engine.free_key(standing.execution_id)

    @overload
    async def submit_many(
        self, task: Submittable[R], arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[Run[R]]: ...
    @overload
    async def submit_many(
        self, task: str, arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[Run[Any]]: ...
    async def submit_many(
        self, task: Submittable[Any] | str, arguments: Iterable[Any], **options: Unpack[OptionNames]
    ) -> list[Run[Any]]:
        """Submit a task once per item of `arguments`, up to a thousand to a call.

        A tuple is the arguments of one submission, anything else its one argument; what `task.submission(...)` gives is
        taken as it is, with options of its own. A wrong argument anywhere fails before anything is stored.

        With a middleware around submissions they go one by one, and one that it refuses ends it: those before are
        stored and their handles lost. A `RateLimit` had better be one with `wait=True`.
        """
        known = self._task(task)
        chosen = known.defaults.merged(Options.of(options))
        if not isinstance(arguments, Iterable):
            raise InvalidInput(f"got {type(arguments).__name__}", field="arguments", allowed="one item per submission")
        given = list(arguments)
        if chosen.idempotency_key and sum(not isinstance(one, Submission) for one in given) > 1:
            raise InvalidInput(
                "one key for several",
                field="idempotency_key",
                allowed="task.submission(..., idempotency_key=...) for each",
            )
        is_plain = not overriding(self._connector.middleware, "submit") and current.scope_of(self._connector) is None
        if is_plain and not any(isinstance(one, Submission) for one in given):
            encode, seal = known.signature.encode, known.codecs.seal
            sealed = [seal(encode(one if isinstance(one, tuple) else (one,), {})) for one in given]
            if all(encoding is None for _, encoding in sealed):
                alike = await self._create_alike(chosen.item(known.name, b"", None), [data for data, _ in sealed])
                if alike is not None:
                    return [Run(place, kind=known.name, connector=self._connector) for place in alike]
        submissions = [
            one
            if isinstance(one, Submission)
            else Submission(task=known, args=one if isinstance(one, tuple) else (one,), options=chosen)
            for one in given
        ]
        items = [one.item() for one in submissions]
        if not is_plain:
            return [await self.send(one) for one in submissions]
        runs: list[Run[Any]] = []
        for batch in _batches(items, lambda item: len(item.input_payload)):
            verdicts = await self.engine.create_many(batch)
            await self._check_kinds(batch, verdicts)
            for item, verdict in zip(batch, verdicts, strict=True):
                one = submissions[len(runs)]
                if isinstance(verdict, FlowFabricError):
                    raise verdict
                if isinstance(verdict, Duplicate) and await self._is_free(verdict, one.options):
                    verdict = await self.create(item, one.options)  # noqa: PLW2901 - the answer to the second try
                runs.append(self._made(one, verdict))
        return runs

    async def _check_kinds(
        self, items: Sequence[NewExecution], verdicts: Sequence[Created | Duplicate | FlowFabricError]
    ) -> None:
        known = [
            (verdict, item.execution_kind)
            for item, verdict in zip(items, verdicts, strict=True)
            if isinstance(verdict, Duplicate)
        ]
        await _together([self._check_kind(*one) for one in known])

    async def _create_alike(self, item: NewExecution, payloads: list[bytes]) -> list[tuple[int, UUID]] | None:
        """Create executions that differ in their payload alone, a few calls at a time; None when they cannot be so."""
        if not self.engine.is_plain(item) or (payloads and max(map(len, payloads)) > MAX_PAYLOAD):
            return None
        batches = list(_batches(payloads, len))
        made: list[list[tuple[int, UUID]]] = [[] for _ in batches]
        numbers = iter(range(len(batches)))

        async def line() -> None:
            for number in numbers:
                made[number] = await self.engine.create_alike(item, batches[number])

        await _together([line() for _ in range(min(_LINES, len(batches)))])
        return [place for batch in made for place in batch]

    async def submit_flow(self, flow: Graph, *, idempotency_key: str | None = None) -> FlowRun:
        """Submit a flow that was built with `app.flow()`, in one call. See `Flow.submit`."""
        scope = current.scope_of(self._connector)
        seed = None if scope is None else await scope.flow_seed(flow.name)
        engine = self.engine
        if flow.grows is not None:
            flow_id = flow.grows
        elif idempotency_key is not None:
            flow_id = flow.id_of(idempotency_key)
        else:
            flow_id = FlowId(mint_uuid() if seed is None else uuid5(seed, "flow"))
        # With a key the ids come from it: they are right whoever of several was first.
        ids = flow.ids(flow_id, engine.flow_partitions, seed if idempotency_key is None else flow_id)
        nodes = flow.build(ids, await self._through(flow, ids))
        if flow.grows is not None:
            if not nodes:
                return self.flow(flow.grows)
            made = await engine.extend_flow(flow_id, nodes)
        else:
            made = await engine.submit_flow(
                nodes, flow_kind=flow.name, namespace=flow.namespace, flow_id=flow_id, tags=dict(flow.tags)
            )
        # What an earlier run of this handler has made is as new to this one.
        is_new = not made.existed or (seed is not None and idempotency_key is None)
        run = FlowRun(made.flow_id, nodes=ids, connector=self._connector, is_new=is_new)
        return run if is_new else await run.refresh()

    async def _through(self, flow: Graph, ids: Mapping[str, ExecutionId]) -> dict[str, Submission] | None:
        """The submissions of a flow's nodes as the middleware leaves them; all are stored once it has seen all."""
        if not overriding(self._connector.middleware, "submit"):
            return None
        changed: dict[str, Submission] = {}
        for name, submission in flow.submissions().items():

            async def final(seen: Submission, name: str = name) -> Run[Any]:
                changed[name] = seen
                return Run(ids[name], kind=seen.kind, connector=self._connector)

            await self._around(final)(submission)
            if name not in changed:
                raise InvalidInput(f"a middleware did not submit node {name!r}", field="middleware", allowed="proceed")
        return changed

    def flow(self, flow_id: str | UUID | FlowRun) -> FlowRun:
        """A handle on a flow from its id (or from a handle of another process)."""
        if isinstance(flow_id, FlowRun):
            return FlowRun(flow_id.flow_id, nodes=flow_id.nodes, connector=self._connector, is_new=flow_id.is_new)
        return FlowRun(FlowId(parse_uuid(flow_id, "flow_id")), connector=self._connector, is_new=False)

    async def flows(
        self, *, namespace: str | None = None, name: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> Page[FlowInfo, str]:
        """One page of flows, newest first; `name` is what `app.flow` was given."""
        return await self.engine.find_flows(namespace=namespace, flow_kind=name, limit=limit, cursor=cursor)

    def _task(self, task: Submittable[Any] | str) -> Submittable[Any]:
        if not isinstance(task, str):
            return check_task(task)
        found = self._connector.tasks.get(task)
        if found is None:
            raise NotFound("task", task, detail=meant(task, self._connector.tasks))
        return found

    # Looking

    def run(self, execution_id: str | ExecutionId | Run[Any], *, kind: str | None = None) -> Run[Any]:
        """A handle from an id (or from a handle of another process)."""
        if isinstance(execution_id, Run):
            known = execution_id
            return Run(known.execution_id, kind=known.kind or kind, connector=self._connector, is_new=known.is_new)
        return Run(ExecutionId.parse(execution_id), kind=kind, connector=self._connector)

    async def get(self, execution_id: str | ExecutionId) -> Execution:
        """Everything stored about an execution but payload and result; `NotFound` when it is not stored."""
        wanted = ExecutionId.parse(execution_id)
        found = await self.engine.read_execution(wanted)
        if found is None:
            raise NotFound("execution", wanted)
        return found

    async def find(
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
        """One page of executions, newest first. A page may be short of `limit` although `next_cursor` is set."""
        return await self.engine.find_executions(
            states=states,
            lane_ids=None if lane is None else [lane],
            kinds=None if kind is None else [kind],
            namespace=namespace,
            tag=tag,
            created_from=created_from,
            created_before=created_before,
            limit=limit,
            cursor=cursor,
        )

    # Signals

    async def waits(
        self,
        *,
        lane: str | None = None,
        namespace: str | None = None,
        key: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Wait, str]:
        """The waitpoints that can be signalled, of all executions, the longest waiting first."""
        return await self.engine.list_waits(
            lane_id=lane, namespace=namespace, waitpoint_key=key, limit=limit, cursor=cursor
        )

    async def waitpoints_of(self, execution_id: str | ExecutionId) -> list[PendingWaitpoint]:
        """The waitpoints of an execution that can be signalled now."""
        found: list[PendingWaitpoint] = []
        after: UUID | None = None
        while True:
            page = await self.engine.list_pending_waitpoints(ExecutionId.parse(execution_id), after=after, limit=1000)
            found += page.items
            after = page.next_cursor
            if after is None:
                return found

    async def signal(
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
        """Send an execution a signal; `key` names the waitpoint where there are several."""
        target = ExecutionId.parse(execution_id)
        data, encoding = encode_payload(payload, self.codecs)
        waitpoint = await self._waitpoint(target, key)
        token = await self.engine.read_waitpoint_token(PartitionKey("fp", target.partition), waitpoint.waitpoint_id)
        if token is None:
            raise StateError("waitpoint_closed", execution_id=target)
        return await self.engine.deliver_signal(
            target,
            waitpoint.waitpoint_id,
            token,
            signal_name=name,
            source_type=source_type,
            source_identity=source_identity,
            payload=data,
            payload_encoding=encoding,
            idempotency_key=idempotency_key,
        )

    async def approve(
        self, execution_id: str | ExecutionId, key: str | None = None, *, by: str = ""
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `approved` as an operator; `by` is whoever decided."""
        return await self._decide(ExecutionId.parse(execution_id), key, "approved", by)

    async def reject(
        self, execution_id: str | ExecutionId, key: str | None = None, *, by: str = ""
    ) -> Accepted | DuplicateSignal:
        """Send an execution the signal `rejected` as an operator; `by` is whoever decided."""
        return await self._decide(ExecutionId.parse(execution_id), key, "rejected", by)

    async def _decide(self, target: ExecutionId, key: str | None, name: str, by: str) -> Accepted | DuplicateSignal:
        waitpoint = await self._waitpoint(target, key)
        lane = (await self.get(target)).lane_id
        return await self.engine.deliver_approval_signal(
            target, lane, waitpoint.waitpoint_id, signal_name=name, idempotency_suffix=by, source_identity=by
        )

    async def _waitpoint(self, target: ExecutionId, key: str | None) -> PendingWaitpoint:
        """The waitpoint meant: of that key, the one that is waited at, else the newest (others are given up)."""
        found = await self.waitpoints_of(target)
        wanted = common_key(sorted({one.waitpoint_key for one in found}), key) if found else key
        chosen = [one for one in found if one.waitpoint_key == wanted]
        if not chosen:
            raise NotFound("waitpoint", wanted, detail=meant(wanted or "", {one.waitpoint_key for one in found}))
        return max(chosen, key=lambda one: (one.state == "active", one.created_at))

    async def resume(self, execution_id: str | ExecutionId, delay: Duration = 0) -> None:
        """Resume a suspended execution whatever it waits for; its wait ends without a signal."""
        await self.engine.resume_execution(ExecutionId.parse(execution_id), "operator", duration(delay, "delay"))

    async def receive(
        self,
        callback: str,
        body: bytes = b"",
        *,
        name: str = "callback",
        source_type: str = "callback",
        source_identity: str = "",
        idempotency_key: str | None = None,
    ) -> Received:
        """Take a callback that came over the web: `callback` is the text of the link, `body` what was sent (JSON).

        Never raises for what the sender did wrong: `Received` has the HTTP status and a body to answer with.
        """
        return await receive(
            self.engine,
            callback,
            body,
            name=name,
            source_type=source_type,
            source_identity=source_identity,
            idempotency_key=idempotency_key,
            codecs=self.codecs,
        )

    async def look(self, callback: str) -> PendingWaitpoint | None:
        """What a callback's link is for: the waitpoint it signals, or None when it is not (or no longer) good."""
        try:
            parsed = parse_callback(callback)
        except InvalidInput:
            return None
        if await self.engine.probe_waitpoint(parsed.execution_id, parsed.waitpoint_id, parsed.token) != "ok":
            return None
        kids = await self.engine.list_waitpoint_hmac_kids()
        if parsed.token.kid not in (kids.current_kid, *(one.kid for one in kids.verifying)):
            return None
        found = await self.waitpoints_of(parsed.execution_id)
        return next((one for one in found if one.waitpoint_id == parsed.waitpoint_id), None)

    # Lists

    async def all(self, **filters: Unpack[Filters]) -> AsyncIterator[ExecutionInfo]:
        """Every execution that `find` would page through."""
        async for page in self._pages(filters):
            for item in page:
                yield item

    async def _pages(self, filters: Filters) -> AsyncIterator[Sequence[ExecutionInfo]]:
        """Pages by the time of creation: what happens to the executions of one does not change the next."""
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
        """What ended without success, newest first."""
        _check_filters(filters)
        wanted: Filters = {"states": _FAILED, **filters}
        return await self.find(**wanted, limit=limit, cursor=cursor)

    # Changing

    async def cancel(self, execution_id: str | ExecutionId, reason: str = "cancelled by a client") -> None:
        """End an execution as cancelled, whatever it is doing. Cancelling it again changes nothing."""
        await self.engine.cancel(Operator(ExecutionId.parse(execution_id)), reason)

    async def replay(self, execution_id: str | ExecutionId, *, reason: str | None = None) -> None:
        """Run an ended execution again; finished steps are kept unless it had succeeded."""
        await self.engine.replay_execution(ExecutionId.parse(execution_id), reason=reason)

    async def change_priority(self, execution_id: str | ExecutionId, priority: int) -> None:
        """Another rank for an execution that waits."""
        await self.engine.change_priority(ExecutionId.parse(execution_id), priority)

    async def delete(self, execution_id: str | ExecutionId) -> None:
        """Forget an ended execution now."""
        await self.engine.delete_execution(ExecutionId.parse(execution_id))

    async def redact(self, execution_id: str | ExecutionId) -> None:
        """Remove what an ended execution carried; its history stays."""
        await self.engine.redact_execution(ExecutionId.parse(execution_id))

    async def cancel_all(
        self, reason: str, *, progress: Callable[[int], object] | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Cancel everything the filters match that has not ended; answers how many.

        Goes chunk by chunk and calls `progress` after each with how many it is so far.
        """
        return await self._each_chunk(
            lambda ids: self.engine.cancel_many(ids, reason), progress, {"states": _NOT_ENDED, **filters}
        )

    async def replay_all(
        self, reason: str | None = None, *, progress: Callable[[int], object] | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Replay everything the filters match that failed or expired; answers how many. As `cancel_all` goes."""
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
            # Whatever came in between (it ended by itself, it was replayed too often) is no reason to stop.
            done += sum(not isinstance(verdict, FlowFabricError) for verdict in verdicts)
            if progress is not None:
                progress(done)
        return done

    # Lanes and schedules

    async def lanes(self) -> list[LaneStats]:
        """How every lane stands."""
        return await self.engine.lane_stats()

    async def set_lane_state(self, lane: str, state: LaneState | str) -> LaneState:
        """Pause, drain, disable or open a lane; answers the state before."""
        return await self.engine.set_lane_state(lane, state)

    async def schedules(self) -> list[Schedule]:
        """All schedules by name."""
        found: list[Schedule] = []
        cursor: str | None = None
        while True:
            page = await self.engine.list_schedules(cursor=cursor, limit=1000)
            found.extend(page.items)
            if page.next_cursor is None:
                return found
            cursor = page.next_cursor

    async def pause_schedule(self, name: str) -> None:
        """Let a schedule fire no more until it is resumed."""
        await self.engine.pause_schedule(name)

    async def resume_schedule(self, name: str) -> None:
        """Let a paused schedule fire again, catching up as it is set to."""
        await self.engine.resume_schedule(name)

    async def delete_schedule(self, name: str) -> None:
        """Forget a schedule. What it has created stays."""
        await self.engine.delete_schedule(name)


_FAILED = (State.FAILED, State.EXPIRED)
_NOT_ENDED = tuple(state for state in State if not state.is_terminal)


def new_submission(task: Submittable[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Submission:
    """A submission of a task. Keywords that name options and no parameter of the task are taken as options."""
    check_task(task)
    if not kwargs:
        return Submission(task=task, args=args, options=task.defaults)
    arguments = {name: value for name, value in kwargs.items() if name in task.parameter_names}
    given = {name: value for name, value in kwargs.items() if name not in arguments}
    for name in given:
        if name not in OPTION_NAMES:
            raise _no_keyword(task, name)
    options = task.defaults.merged(Options.of(given)) if given else task.defaults
    return Submission(task=task, args=args, kwargs=arguments, options=options)


async def _together(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All at a time; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_filters(given: Mapping[str, Any]) -> None:
    known = Filters.__annotations__
    for name in given:
        if name not in known:
            near = meant(name, known)
            raise InvalidInput("is no filter" + (f"; {near}" if near else ""), field=name, allowed=", ".join(known))


def _key_is_known(standing: Duplicate, of: str = "") -> Conflict:
    found = standing.execution_id
    detail = f"the idempotency key is known: execution {found}{of}"
    return Conflict("duplicate_submission", detail, existing=found, execution_id=found)


def _batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    size = 0
    for item in items:
        size += size_of(item)
        if batch and (len(batch) == _MOST or size > _MOST_BYTES):
            yield batch
            batch, size = [], size_of(item)
        batch.append(item)
    if batch:
        yield batch


def _no_keyword(task: Submittable[Any], name: str) -> InvalidInput:
    signature = task.signature
    if name == signature.context_param or name in signature.data:
        problem = f"is no argument of {task.name}: the worker gives it"
    else:
        near = meant(name, task.parameter_names | OPTION_NAMES)
        problem = f"is neither an argument of {task.name} nor an option" + (f"; {near}" if near else "")
    names = ", ".join(parameter.name for parameter in signature.parameters)
    return InvalidInput(problem, field=name, allowed=names or "no arguments")
