"""Recurring work: stored, listed, paused, and fired by exactly one of many processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from flowfabric._postgres import create_call, rows
from flowfabric._postgres.create_call import CreateCall
from flowfabric.engine.calls import ESCAPED_NUL, Calls, check_batch, check_limit, moment, optional_bytes
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.checks import check_text
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId
from flowfabric.values.page import Page
from flowfabric.values.schedule import DueSchedule, Schedule

CATCH_UP = ("skip", "one", "all")
_CREATE = create_call.create_sql().split(" from ", 1)[1]
# Whoever moves the schedule on from the time it read creates what is due; for everybody else there is no row to join.
_FIRE = (
    "select c.ordinal, c.code, c.partition, c.id, c.state,"  # noqa: S608 - placeholders only
    " case when c.code <> 'lane_closed' and c.ordinal in (0, $28)"
    " then flowfabric.schedule_made($24, ($5::integer[])[$28], ($6::uuid[])[$28]) end"
    " from flowfabric.advance_schedule($24, $25, $26, $27) h"
    f" cross join lateral {_CREATE.replace('$7::boolean', '($7::boolean and h.moved)')} c"
)
_SKIP = "select moved from flowfabric.advance_schedule($1, $2, $3, null)"


class Schedules(Calls):
    """put_schedule, list, read, pause, resume, delete, schedule_as_due, due_schedules, fire_schedule."""

    async def put_schedule(
        self,
        name: str,
        *,
        kind: str,
        timing: Mapping[str, Any],
        next_at: datetime | None,
        catch_up: str = "skip",
        payload: bytes = b"",
        payload_encoding: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Literal["created", "changed", "unchanged"]:
        """Store a schedule under its name. One whose timing is the same keeps its next time, and its pause."""
        if not isinstance(catch_up, str) or catch_up not in CATCH_UP:
            raise InvalidInput(f"got {catch_up!r}", field="catch_up", allowed=", ".join(CATCH_UP))
        row = await self._row(
            "select flowfabric.put_schedule($1, $2, $3, $4, $5, $6, $7, $8) as did",
            _name(name),
            check_text(kind, "kind"),
            _json(timing, "timing"),
            catch_up,
            optional_bytes(payload, "payload") or b"",
            None if payload_encoding is None else check_text(payload_encoding, "payload_encoding"),
            _json({} if options is None else options, "options"),
            None if next_at is None else moment(next_at, "next_at"),
            repeatable=True,
        )
        did: Literal["created", "changed", "unchanged"] = row["did"]
        return did

    async def list_schedules(self, *, cursor: str | None = None, limit: int = 100) -> Page[Schedule, str]:
        """All schedules by name."""
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            "select * from flowfabric.list_schedules(null, $1, $2)",
            None if cursor is None else _name(cursor, "cursor"),
            size + 1,
            repeatable=True,
        )
        items = [rows.schedule(row) for row in found[:size]]
        return Page(items, items[-1].name if len(found) > size else None)

    async def read_schedule(self, name: str) -> Schedule | None:
        """One schedule; None when there is none of that name."""
        found = await self._fetch("select * from flowfabric.list_schedules($1, null, 1)", _name(name), repeatable=True)
        return rows.schedule(found[0]) if found else None

    async def schedule_as_due(self, name: str) -> DueSchedule | None:
        """A schedule as if it were due now, whatever its times and its pause; None when there is none of that name."""
        found = await self._fetch(
            "select s.*, flowfabric.server_now() as now from flowfabric.list_schedules($1, null, 1) s",
            _name(name),
            repeatable=True,
        )
        return _due({**found[0], "next_at": found[0]["now"]}) if found else None

    async def pause_schedule(self, name: str) -> None:
        """Let it fire no more until it is resumed."""
        await self._existing("select flowfabric.set_schedule_paused($1, true, null) as found", name)

    async def resume_schedule(self, name: str, *, next_at: datetime | None = None) -> None:
        """Let it fire again: from `next_at` on, or from where it was paused, catching up as it is set to."""
        await self._existing(
            "select flowfabric.set_schedule_paused($1, false, $2) as found",
            name,
            None if next_at is None else moment(next_at, "next_at"),
        )

    async def delete_schedule(self, name: str) -> None:
        """Forget it. What it has created stays."""
        await self._existing("select flowfabric.delete_schedule($1) as found", name)

    async def _existing(self, sql: str, name: str, *args: Any) -> None:
        row = await self._row(sql, _name(name), *args)
        if not row["found"]:
            raise NotFound("schedule", name)

    async def due_schedules(self, *, limit: int = 100) -> list[DueSchedule]:
        """What should have fired by now, the oldest first."""
        found = await self._fetch("select * from flowfabric.due_schedules($1)", check_limit(limit, 1000))
        return [_due(row) for row in found]

    async def until_next_schedule(self) -> float | None:
        """Seconds until the next schedule fires; None when none will."""
        row = await self._row("select flowfabric.next_schedule() as seconds", repeatable=True)
        seconds: float | None = row["seconds"]
        return seconds

    async def fire_schedule(
        self,
        name: str,
        due_at: datetime,
        *,
        next_at: datetime | None,
        fired_at: datetime | None,
        items: Sequence[NewExecution],
    ) -> list[ExecutionId] | None:
        """Move a schedule on from `due_at` and create what is due, in one transaction; None when another was quicker.

        The latest of `items` becomes the schedule's last execution. No items: only move on. What a closed lane does not
        take is not created, and the schedule moves on all the same.
        """
        check_batch(items)
        expected = moment(due_at, "due_at")
        following = None if next_at is None else moment(next_at, "next_at")
        if not items:
            return [] if await self._fetch(_SKIP, _name(name), expected, following) else None
        call = CreateCall(items, self._database.flow_partitions)
        if call.refused:
            raise call.refused[0]
        found = await self._fetch(
            _FIRE,
            *call.args,
            _name(name),
            expected,
            following,
            None if fired_at is None else moment(fired_at, "fired_at"),
            len(call.args[5]),
        )
        if not found:
            return None
        verdicts = call.verdicts([tuple(row)[:5] for row in found])
        return [verdict.execution_id for verdict in verdicts if isinstance(verdict, Created | Duplicate)]


def _name(value: str, field: str = "name") -> str:
    name = check_text(value, field)
    if not name:
        raise InvalidInput("empty", field=field, allowed="a non-empty text")
    return name


def _json(value: object, field: str) -> str:
    """A mapping as JSON that the database can hold."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a mapping of JSON values")
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error}", field=field, allowed="a mapping of JSON values") from None
    if ESCAPED_NUL.search(text):
        raise InvalidInput("contains NUL", field=field, allowed="text without NUL")
    return text


def _due(row: Mapping[str, Any]) -> DueSchedule:
    return DueSchedule(
        name=row["name"],
        kind=row["kind"],
        timing=rows.decode_json(row["timing"]),
        catch_up=row["catch_up"],
        payload=row["payload"],
        payload_encoding=row["payload_encoding"],
        options=rows.decode_json(row["options"]),
        due_at=row["next_at"],
        now=row["now"],
    )
