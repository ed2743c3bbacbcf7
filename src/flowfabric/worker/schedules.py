"""The duty that fires schedules, and the functions that store declared schedules."""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flowfabric._duties import Duty
from flowfabric.client.limits import look_up
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.engine import Engine
from flowfabric.errors import ExecutionNotActive, FlowFabricError, InvalidInput, NotFound
from flowfabric.values import timing as timings
from flowfabric.values.durations import counted
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lease import Operator
from flowfabric.values.policies import FrozenPolicy
from flowfabric.values.schedule import DueSchedule, Schedule

if TYPE_CHECKING:
    from flowfabric.app.app import App, ScheduleSpec

log = logging.getLogger("flowfabric.schedules")
SCHEDULE_TAG = "schedule.name"
_MOST_AT_ONCE = 1000


class ScheduleDuty(Duty):
    """Creates the executions of due schedules. Of any number of processes, one advances each schedule."""

    name = "schedules"
    interval = timedelta(seconds=1)
    _failing: frozenset[str] = frozenset()

    async def run_once(self) -> int:
        made = 0
        failing: set[str] = set()
        for due in await self.engine.due_schedules(limit=1000):
            if self.stopping.is_set():
                break
            try:
                made += await fire(self.engine, due)
            except Exception as error:  # an error in one schedule must not stop the others
                failing.add(due.name)
                if due.name not in self._failing and not self.engine.outage.covers(error):  # logged once
                    log.warning("schedule %s: %s", due.name, error, exc_info=not isinstance(error, FlowFabricError))
        self._failing = frozenset(failing)
        return made

    async def until_next(self) -> float:
        most = self.interval.total_seconds()
        left = None if self._failing else await self.engine.until_next_schedule()
        return most if left is None else min(max(left, 0.0), most)


async def fire(engine: Engine, due: DueSchedule) -> int:
    """Create the due executions of one schedule, unless another process does; returns how many were created.

    With an overlap it creates one at a time: none while the last one has not ended (`skip`, and `queue`, which is not
    due then), or after it was cancelled (`cancel`). A time for which `queue` waited is not a missed one.
    """
    timing = timings.from_json(due.timing)
    overlap = due.options.get("overlap")
    catch_up = cast("timings.CatchUp", due.catch_up)
    times, following = timings.missed(
        timing,
        due_at=due.due_at,
        now=due.now,
        catch_up="one" if overlap == "queue" and catch_up == "skip" else catch_up,
        limit=1 if overlap == "queue" else _MOST_AT_ONCE,
    )
    if overlap in ("skip", "cancel"):
        times = times[-1:]
    if due.live_id is not None and overlap == "skip" and times:
        log.info("schedule %s: %s has not ended, so %s is skipped", due.name, due.live_id, times[-1])
        times = []
    elif due.live_id is not None and overlap == "cancel" and times:
        with contextlib.suppress(ExecutionNotActive, NotFound):  # it ended meanwhile
            await engine.cancel(Operator(due.live_id), f"the next time of schedule {due.name} is due")
    made = await engine.fire_schedule(
        due.name,
        due.due_at,
        next_at=following,
        fired_at=times[-1] if times else None,
        items=[_item(due, at) for at in times],
    )
    if made is None:
        return 0
    if made:
        log.info("schedule %s fired %s; next at %s", due.name, counted(len(made), "time"), following)
    if len(made) < len(times):
        refused = counted(len(times) - len(made), "submission")
        log.warning("schedule %s: its lane is closed and refused %s", due.name, refused)
    return len(made)


async def run_now(engine: Engine, name: str) -> ExecutionId:
    """Submit a schedule's task once now; its own times do not change. Raises `NotFound` for an unknown name."""
    due = await engine.schedule_as_due(name)
    if due is None:
        raise NotFound("schedule", name)
    (verdict,) = await engine.create_many([_item(due, due.now)])
    if isinstance(verdict, FlowFabricError):
        raise verdict
    return verdict.execution_id


def _item(due: DueSchedule, at: datetime) -> NewExecution:
    options = due.options
    return NewExecution(
        execution_kind=due.kind,
        lane_id=options.get("lane_id", "default"),
        namespace=options.get("namespace", ""),
        input_payload=due.payload,
        payload_encoding=due.payload_encoding,
        priority=options.get("priority", 0),
        creator_identity=f"schedule {due.name}".encode()[:256].decode(errors="ignore"),
        tags={**options.get("tags", {}), SCHEDULE_TAG: due.name, "schedule.time": at.isoformat()},
        policy=options.get("policy"),
        execution_deadline_at=(
            timedelta(milliseconds=options["deadline_ms"]) if options.get("deadline_ms") is not None else None
        ),
    )


async def declare(engine: Engine, app: App) -> None:
    """Store the schedules an app declares."""
    for spec in app.declared.values():
        did = await store(engine, spec, app)
        if did != "unchanged":
            log.info("schedule %s %s", spec.name, did)


async def store(engine: Engine, spec: ScheduleSpec, app: App) -> str:
    """Store one schedule; returns created, changed or unchanged. `InvalidInput` if it belongs to another app."""
    await look_up(engine, [(app.limit_names, app.limit_names.unknown(spec.submission.options))])
    item: NewExecution = spec.submission.item(bound=False)
    payload, encoding = item.input_payload, item.payload_encoding
    before = await engine.read_schedule(spec.name)
    if before is not None:
        owner = before.options.get("app", app.name)
        if owner != app.name:
            raise InvalidInput(
                f"the schedule {spec.name!r} belongs to the app {owner!r}", field="name", allowed="another name"
            )
        if before.kind != item.execution_kind:
            log.warning(
                "schedule %s submitted %s before and now submits %s", spec.name, before.kind, item.execution_kind
            )
        if _is_same(app, before, item):
            # A codec may write the same arguments differently each time.
            payload, encoding = before.payload, before.payload_encoding
    options: dict[str, Any] = {
        "app": app.name,
        "lane_id": item.lane_id,
        "namespace": item.namespace,
        "priority": item.priority,
    }
    if spec.overlap is not None:
        options["overlap"] = spec.overlap
    if item.tags:
        options["tags"] = dict(item.tags)
    if isinstance(item.policy, FrozenPolicy):
        options["policy"] = msgspec.json.decode(item.policy.text)
    if isinstance(item.execution_deadline_at, timedelta):
        options["deadline_ms"] = int(item.execution_deadline_at.total_seconds() * 1000)
    now = datetime.fromtimestamp(await engine.server_time_ms() / 1000, tz=UTC)
    return await engine.put_schedule(
        spec.name,
        kind=item.execution_kind,
        timing=spec.timing.to_builtins(),
        next_at=spec.timing.next_after(now),
        catch_up=spec.catch_up,
        payload=payload,
        payload_encoding=encoding,
        options=options,
    )


def _is_same(app: App, before: Schedule, item: NewExecution) -> bool:
    try:
        return app.codecs.open(before.payload, before.payload_encoding, None) == app.codecs.open(
            item.input_payload, item.payload_encoding, None
        )
    except CannotDecode:
        return False
