"""The client: submit, look, wait, cancel, replay, list. `Client` is generated from this one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

from flowfabric.client import current
from flowfabric.client.outcomes import Outcomes
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, Submittable
from flowfabric.contracts import Codecs, ValueType
from flowfabric.engine import Engine
from flowfabric.engine.reads import Place
from flowfabric.errors import Conflict, FlowFabricError, InvalidInput, NotFound
from flowfabric.ids import ExecutionId
from flowfabric.middleware import Middleware, chain_submit, overriding
from flowfabric.models import (
    Created,
    Duplicate,
    Execution,
    ExecutionInfo,
    LaneState,
    LaneStats,
    NewExecution,
    Operator,
    Page,
    Schedule,
)
from flowfabric.options import OPTION_NAMES, Options
from flowfabric.state import State

R = TypeVar("R")
_ANYTHING = ValueType.of(Any)
_CHUNK = 500


class Connector(Protocol):
    """Whoever knows the tasks and the way to a client: an app."""

    @property
    def name(self) -> str: ...

    @property
    def codecs(self) -> Codecs: ...

    @property
    def middleware(self) -> Sequence[Middleware]: ...

    async def client(self) -> AsyncClient: ...

    async def close(self) -> None: ...

    def find_task(self, name: str) -> Submittable | None: ...


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
        task = None if kind is None else self._connector.find_task(kind)
        return _ANYTHING if task is None else task.signature.result

    # Submitting

    async def submit(self, task: Submittable | str, *args: Any, **kwargs: Any) -> Run[Any]:
        """Submit a task, by object or by name. Keywords that are options and no parameters of the task are options."""
        return await self.send(self.submission(task, args, kwargs))

    def submission(self, task: Submittable | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Submission:
        """A submission of a task; the options among the keywords are taken out."""
        known = self._task(task) if isinstance(task, str) else task
        return new_submission(known, args, kwargs)

    async def send(self, submission: Submission) -> Run[Any]:
        """Submit what `submission` says, through the middleware."""
        middleware = self._connector.middleware
        return await (chain_submit(middleware, self._send)(submission) if middleware else self._send(submission))

    async def _send(self, submission: Submission) -> Run[Any]:
        scope = current.running.get()
        if scope is not None:
            return await scope.submit_durably(submission)
        verdict = await self.create(submission.item(), submission.options)
        return Run(
            verdict.execution_id,
            kind=submission.kind,
            connector=self._connector,
            is_new=isinstance(verdict, Created),
        )

    async def create(self, item: NewExecution, options: Options) -> Created | Duplicate:
        """Create one execution, doing with a known key what the options say."""
        while True:
            verdict = (await self.engine.create_many([item]))[0]
            if isinstance(verdict, FlowFabricError):
                raise verdict
            if isinstance(verdict, Created) or options.on_duplicate not in ("raise", "replace"):
                return verdict
            if options.on_duplicate == "raise":
                raise Conflict(
                    "duplicate_submission",
                    f"the idempotency key is known: execution {verdict.execution_id}",
                    existing=verdict.execution_id,
                    execution_id=verdict.execution_id,
                )
            if not await self.engine.free_key(verdict.execution_id):
                return verdict  # it has not failed: it stands

    async def submit_many(self, task: Submittable | str, arguments: Iterable[Any], **options: Any) -> list[Run[Any]]:
        """Submit a task once per item of `arguments`, in few calls.

        A tuple is the arguments of one submission, anything else its one argument. A wrong argument anywhere fails
        before anything is stored. Not atomic beyond a thousand.
        """
        known = self._task(task) if isinstance(task, str) else task
        unknown = set(options) - OPTION_NAMES
        if unknown:
            raise InvalidInput(
                f"unknown option {sorted(unknown)[0]!r}", field="options", allowed=", ".join(sorted(OPTION_NAMES))
            )
        chosen = known.defaults.merged(Options(**options))
        if current.running.get() is not None:
            return [await self.send(new_submission(known, *_call(one), chosen)) for one in arguments]
        if overriding(self._connector.middleware, "submit"):
            return [await self.send(new_submission(known, *_call(one), chosen)) for one in arguments]
        seal, encode, policy = self.codecs.seal, known.signature.encode, chosen.policy
        items = [
            chosen.item(known.name, *seal(encode(args, kwargs)), policy=policy)
            for args, kwargs in (_call(one) for one in arguments)
        ]
        runs: list[Run[Any]] = []
        for at in range(0, len(items), 1000):
            for verdict in await self.engine.create_many(items[at : at + 1000]):
                if isinstance(verdict, FlowFabricError):
                    raise verdict
                runs.append(
                    Run(
                        verdict.execution_id,
                        kind=known.name,
                        connector=self._connector,
                        is_new=isinstance(verdict, Created),
                    )
                )
        return runs

    def _task(self, name: str) -> Submittable:
        task = self._connector.find_task(name)
        if task is None:
            raise NotFound("task", name)
        return task

    # Looking

    def run(self, execution_id: str | ExecutionId | Run[Any], *, kind: str | None = None) -> Run[Any]:
        """A handle from an id (or from a handle of another process)."""
        if isinstance(execution_id, Run):
            return Run(execution_id.execution_id, kind=execution_id.kind or kind, connector=self._connector)
        return Run(ExecutionId.parse(execution_id), kind=kind, connector=self._connector)

    async def get(self, execution_id: str | ExecutionId) -> Execution:
        """Everything stored about an execution but payload and result; `NotFound` when it is not stored."""
        return await self.run(execution_id).get()

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

    async def all(self, **filters: Any) -> AsyncIterator[ExecutionInfo]:
        """Every execution that `find` would page through."""
        cursor: Place | None = None
        while True:
            page = await self.find(**{"limit": _CHUNK, **filters, "cursor": cursor})
            for item in page.items:
                yield item
            if page.next_cursor is None:
                return
            cursor = page.next_cursor

    async def failures(self, *, limit: int = 50, **filters: Any) -> Page[ExecutionInfo, Place]:
        """What ended without success, newest first."""
        return await self.find(states=(State.FAILED, State.EXPIRED), limit=limit, **filters)

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

    async def cancel_all(self, reason: str, **filters: Any) -> AsyncIterator[int]:
        """Cancel everything the filters match that has not ended; yields how many so far, chunk by chunk."""
        states = filters.pop("states", None) or [state for state in State if not state.is_terminal]
        done = 0
        async for ids in self._chunks(states=states, **filters):
            verdicts = await self.engine.cancel_many(ids, reason)
            done += sum(not isinstance(verdict, FlowFabricError) for verdict in verdicts)
            yield done

    async def replay_all(self, reason: str | None = None, **filters: Any) -> AsyncIterator[int]:
        """Replay everything the filters match that failed or expired; yields how many so far, chunk by chunk."""
        states = filters.pop("states", None) or (State.FAILED, State.EXPIRED)
        done = 0
        async for ids in self._chunks(states=states, **filters):
            verdicts = await self.engine.replay_many(ids, reason=reason)
            done += sum(not isinstance(verdict, FlowFabricError) for verdict in verdicts)
            yield done

    async def _chunks(self, **filters: Any) -> AsyncIterator[list[ExecutionId]]:
        """Ids in chunks, all read before the first is given out: changing them must not change what is found."""
        found = [item.execution_id async for item in self.all(**filters)]
        for at in range(0, len(found), _CHUNK):
            yield found[at : at + _CHUNK]

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


def new_submission(
    task: Submittable, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options | None = None
) -> Submission:
    """A submission of a task. Keywords that name options and no parameter of the task are taken as options."""
    given = {name: kwargs[name] for name in kwargs if name in OPTION_NAMES and name not in task.parameter_names}
    chosen = task.defaults if options is None else options
    if given:
        chosen = chosen.merged(Options(**given).checked())
        kwargs = {name: value for name, value in kwargs.items() if name not in given}
    return Submission(task=task, args=args, kwargs=kwargs, options=chosen)


def _call(one: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return (one if isinstance(one, tuple) else (one,)), {}
