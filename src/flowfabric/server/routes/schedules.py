"""Schedules: store, list, pause, resume, run and delete them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from flowfabric._postgres.create_call import CreateCall
from flowfabric.contracts.json_form import payload_or_problem
from flowfabric.contracts.json_types import ENCODER
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.members import Limit
from flowfabric.server.new_execution import SubmitExecution, learn_limits, new_execution
from flowfabric.server.operation import LARGE, Operation, Repeats, Scope, Within
from flowfabric.server.versions import check_match, stale, tag_of, unchanged
from flowfabric.server.visible import open_each, size_of
from flowfabric.values.cron import Cron
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import PARTITION_VALUES, ExecutionId
from flowfabric.values.policies import FrozenPolicy
from flowfabric.values.schedule import Schedule
from flowfabric.values.timing import Every, Timing, from_json, parse_timing
from flowfabric.worker.schedules import run_now

_PATH: Final = "/v1/schedules/{name}"
_CHANGED: Final = "the schedule was changed or deleted since, or does not exist"


class ListSchedules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespace: str | None = None
    limit: Limit = 100
    cursor: str | None = None


class PutSchedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A submission, and when to make it: `cron` with its `timezone`, or `every_seconds` counted from `anchor`.

    `catch_up`: what happens to times that passed while nothing ran: nothing, one submission, or one each. `overlap`:
    what happens at a time at which the last execution has not ended; left out, another one is submitted.
    """

    execution_kind: str
    cron: str | None = None
    timezone: str | None = None
    every_seconds: float | None = None
    anchor: datetime | None = None
    catch_up: Literal["skip", "one", "all"] = "skip"
    overlap: Literal["skip", "queue", "cancel"] | None = None
    arguments: dict[str, Any] | None = None
    lane_id: str | None = None
    namespace: str | None = None
    priority: int | None = None
    tags: dict[str, str] | None = None
    policy: dict[str, Any] | None = None
    execution_deadline_seconds: float | None = None


class ShownSchedule(Struct, frozen=True, kw_only=True):
    """A schedule, with the members that a PUT takes. `app` declares it, if one does."""

    name: str
    execution_kind: str
    cron: str | None
    timezone: str | None
    every_seconds: float | None
    anchor: datetime | None
    catch_up: str
    overlap: str | None
    arguments: Any
    lane_id: str
    namespace: str
    priority: int
    tags: dict[str, str]
    policy: dict[str, Any] | None
    execution_deadline_seconds: float | None
    app: str | None
    paused: bool
    next_at: datetime | None
    last_at: datetime | None
    last_execution_id: ExecutionId | None
    created_at: datetime
    updated_at: datetime


class StoredSchedule(Struct, frozen=True, kw_only=True):
    status: Literal["created", "changed", "unchanged"]
    schedule: ShownSchedule


class ScheduleRun(Struct, frozen=True, kw_only=True):
    name: str
    execution_id: ExecutionId


async def list_schedules(call: Call) -> Page:
    """List schedules by name; with a namespace those that submit to it."""
    page = await call.engine.list_schedules(namespace=call.namespace, cursor=call.query.cursor, limit=call.query.limit)
    items = await open_each(call, page.items, lambda one: _shown(call, one), lambda one: size_of(one.payload))
    return Page(items=items, next_cursor=page.next_cursor)


async def get_schedule(call: Call) -> Answer:
    """Read a schedule."""
    found = await _existing(call)
    return Answer(body=await _opened(call, found), etag=_etag(found))


async def put_schedule(call: Call) -> Answer:
    """Store a schedule under its name.

    201: it is new; 200: it existed. If its timing is unchanged it keeps its next time; it stays paused if it was. With
    `If-Match`, the `ETag` that it was read with, nothing changes if it was changed since. A schedule that an app
    declares is refused: the app would store its own again.
    """
    name, body = call.path["name"], call.body
    timing = _timing(body)
    before = await call.engine.read_schedule(name)
    if before is not None and before.options.get("app"):
        raise InvalidInput(
            f"the app {before.options['app']!r} declares this schedule", field="name", allowed="another name"
        )
    expected = None
    if call.if_match is not None:
        if before is None:
            raise stale(_CHANGED)
        _expected(call, before)
        expected = before.updated_at  # also with `*`: one that is deleted meanwhile must not be made anew
    await learn_limits(call, [body.execution_kind])
    item = _checked(call, body)
    now = datetime.fromtimestamp(await call.engine.server_time_ms() / 1000, tz=UTC)
    status = await call.engine.put_schedule(
        name,
        kind=body.execution_kind,
        timing=timing.to_builtins(),
        next_at=timing.next_after(now),
        catch_up=body.catch_up,
        payload=item.input_payload,
        payload_encoding=item.payload_encoding,
        options=_options(body, item),
        expected=expected,
    )
    if status == "mismatch":
        raise stale(_CHANGED)
    stored = await _existing(call)
    return Answer(
        body=StoredSchedule(status=status, schedule=await _opened(call, stored)),
        status=201 if status == "created" else 200,
        etag=_etag(stored),
    )


async def delete_schedule(call: Call) -> None:
    """Delete a schedule. The executions it submitted stay."""
    with unchanged():
        await call.engine.delete_schedule(call.path["name"], expected=await _matched(call))


async def pause_schedule(call: Call) -> Answer:
    """Stop firing a schedule until it is resumed."""
    with unchanged():
        await call.engine.pause_schedule(call.path["name"], expected=await _matched(call))
    return await get_schedule(call)


async def resume_schedule(call: Call) -> Answer:
    """Fire a schedule again. It makes up for the times it missed as its `catch_up` says."""
    with unchanged():
        await call.engine.resume_schedule(call.path["name"], expected=await _matched(call))
    return await get_schedule(call)


async def run_schedule(call: Call) -> ScheduleRun:
    """Submit the task of a schedule once, now. Its own times do not change."""
    made = await run_now(call.engine, call.path["name"])
    return ScheduleRun(name=call.path["name"], execution_id=made)


async def _existing(call: Call) -> Schedule:
    found = await call.engine.read_schedule(call.path["name"])
    if found is None or not _is_visible(call, found):
        raise NotFound("schedule", call.path["name"])
    return found


async def _matched(call: Call) -> datetime | None:
    """When the version was stored that `If-Match` names; None: whichever version there is."""
    return None if call.if_match is None else _expected(call, await _existing(call))


def _expected(call: Call, found: Schedule) -> datetime | None:
    """The same for a schedule that was read; refused if `If-Match` names another version."""
    return found.updated_at if check_match(call, _etag(found), _CHANGED) else None


def _is_visible(call: Call, found: Schedule) -> bool:
    allowed = call.caller.namespaces
    return allowed is None or found.options.get("namespace", "") in allowed


def _timing(body: PutSchedule) -> Timing:
    try:
        return parse_timing(body.cron, body.every_seconds, body.timezone, anchor=body.anchor)
    except InvalidInput as error:
        field = "every_seconds" if error.field == "every" else error.field
        allowed = (error.allowed or "").replace("every", "every_seconds") or None
        raise InvalidInput(error.problem, field=field, allowed=allowed) from None


def _checked(call: Call, body: PutSchedule) -> NewExecution:
    """What is submitted at each time. Checked now: no caller sees the error of a later submission."""
    item = new_execution(
        call,
        SubmitExecution(
            execution_kind=body.execution_kind,
            arguments=body.arguments,
            lane_id=body.lane_id,
            namespace=body.namespace,
            priority=body.priority,
            tags=body.tags,
            policy=body.policy,
            execution_deadline_seconds=body.execution_deadline_seconds,
        ),
        in_batch=True,
    )
    for error in CreateCall([item], PARTITION_VALUES).refused:
        raise error
    app = call.service.app
    task = None if app is None else app.find_task(body.execution_kind)
    if task is None or not task.codecs.binds:
        return item
    payload, encoding = task.codecs.seal(ENCODER.encode(body.arguments or {}), None)  # of no execution yet
    return replace(item, input_payload=payload, payload_encoding=encoding)


def _options(body: PutSchedule, item: NewExecution) -> dict[str, Any]:
    options: dict[str, Any] = {"lane_id": item.lane_id, "namespace": item.namespace, "priority": item.priority}
    if body.overlap is not None:
        options["overlap"] = body.overlap
    if item.tags:
        options["tags"] = dict(item.tags)
    if isinstance(item.policy, FrozenPolicy):
        options["policy"] = msgspec.json.decode(item.policy.text)
    elif item.policy is not None:
        options["policy"] = item.policy
    if isinstance(item.execution_deadline_at, timedelta):
        options["deadline_ms"] = item.execution_deadline_at // timedelta(milliseconds=1)
    return options


async def _opened(call: Call, one: Schedule) -> ShownSchedule:
    return await call.service.opening.run(size_of(one.payload), lambda: _shown(call, one))


def _shown(call: Call, one: Schedule) -> ShownSchedule:
    timing = from_json(one.timing)
    options = one.options
    arguments: Any = None
    if not call.caller.hides_payloads:
        arguments = payload_or_problem(one.payload, one.payload_encoding, call.service.codecs, None, raw=True)
    deadline = options.get("deadline_ms")
    return ShownSchedule(
        name=one.name,
        execution_kind=one.kind,
        cron=timing.expression if isinstance(timing, Cron) else None,
        timezone=timing.timezone if isinstance(timing, Cron) else None,
        every_seconds=timing.interval.total_seconds() if isinstance(timing, Every) else None,
        anchor=timing.anchor if isinstance(timing, Every) else None,
        catch_up=one.catch_up,
        overlap=options.get("overlap"),
        arguments=arguments,
        lane_id=options.get("lane_id", "default"),
        namespace=options.get("namespace", ""),
        priority=options.get("priority", 0),
        tags=options.get("tags", {}),
        policy=options.get("policy"),
        execution_deadline_seconds=None if deadline is None else deadline / 1000,
        app=options.get("app"),
        paused=one.paused,
        next_at=one.next_at,
        last_at=one.last_at,
        last_execution_id=one.last_execution_id,
        created_at=one.created_at,
        updated_at=one.updated_at,
    )


def _etag(found: Schedule) -> str:
    """A tag in two parts: what a change must know of, and what also changes when the schedule fires."""
    return tag_of(found.updated_at, [found.next_at, found.last_at, found.last_execution_id])


OPERATIONS = (
    Operation(
        method="GET", path="/v1/schedules", handler=list_schedules, engine=("list_schedules",), scope=Scope.READ,
        within=Within.GIVEN, query=ListSchedules, answers={200: list[ShownSchedule]}, etag=True,
    ),
    Operation(
        method="GET", path=_PATH, handler=get_schedule, engine=("read_schedule",), scope=Scope.READ,
        within=Within.ITEMS, answers={200: ShownSchedule}, etag=True,
    ),
    Operation(
        method="PUT", path=_PATH, handler=put_schedule, engine=("put_schedule",), scope=Scope.OPERATE,
        within=Within.EVERY, body=PutSchedule, answers={200: StoredSchedule, 201: StoredSchedule}, limit=LARGE,
        etag=True, made=_PATH,
    ),
    Operation(
        method="DELETE", path=_PATH, handler=delete_schedule, engine=("delete_schedule",), scope=Scope.OPERATE,
        within=Within.EVERY, answers={204: None}, etag=True,
    ),
    Operation(
        method="POST", path=f"{_PATH}/pause", handler=pause_schedule, engine=("pause_schedule",), scope=Scope.OPERATE,
        within=Within.EVERY, answers={200: ShownSchedule}, repeats=Repeats.KEPT, etag=True,
    ),
    Operation(
        method="POST", path=f"{_PATH}/resume", handler=resume_schedule, engine=("resume_schedule",),
        scope=Scope.OPERATE, within=Within.EVERY, answers={200: ShownSchedule}, repeats=Repeats.KEPT, etag=True,
    ),
    Operation(
        method="POST", path=f"{_PATH}/run", handler=run_schedule, engine=("schedule_as_due",), scope=Scope.OPERATE,
        within=Within.EVERY, answers={201: ScheduleRun}, made="/v1/executions/{execution_id}", repeats=Repeats.KEPT,
    ),
)  # fmt: skip
