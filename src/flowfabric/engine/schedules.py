"""Schedules: store, list and pause them; exactly one of many processes fires each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from flowfabric._postgres import rows, statements
from flowfabric._postgres.create_call import CreateCall
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.checks import ESCAPED_NUL, check_batch, check_limit, optional_bytes
from flowfabric.errors import Contention, InvalidInput, NotFound
from flowfabric.values.checks import check_text, moment
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import ExecutionId
from flowfabric.values.page import Page
from flowfabric.values.schedule import DueSchedule, Schedule

CATCH_UP = ("skip", "one", "all")


class Schedules(Operations):
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
        expected: datetime | None = None,
    ) -> Literal["created", "changed", "unchanged", "mismatch"]:
        """Store a schedule under its name. If its timing is unchanged, it keeps its next time and stays paused.

        With `expected`, a stored `updated_at`, it only changes a schedule that has not been changed since.
        """
        if not isinstance(catch_up, str) or catch_up not in CATCH_UP:
            raise InvalidInput(f"got {catch_up!r}", field="catch_up", allowed=", ".join(CATCH_UP))
        row = await self._row(
            statements.PUT_SCHEDULE,
            _name(name),
            check_text(kind, "kind"),
            _json(timing, "timing"),
            catch_up,
            optional_bytes(payload, "payload") or b"",
            None if payload_encoding is None else check_text(payload_encoding, "payload_encoding"),
            _json({} if options is None else options, "options"),
            None if next_at is None else moment(next_at, "next_at"),
            None if expected is None else moment(expected, "expected"),
            repeatable=expected is None,
        )
        did: Literal["created", "changed", "unchanged", "mismatch"] = row["did"]
        return did

    async def list_schedules(
        self, *, namespace: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[Schedule, str]:
        """Return all schedules, or those that submit to a namespace, by name."""
        size = check_limit(limit, 1000)
        if size == 0:
            return Page(())
        found = await self._fetch(
            statements.LIST_SCHEDULES,
            None if namespace is None else check_text(namespace, "namespace"),
            None if cursor is None else _name(cursor, "cursor"),
            size + 1,
            repeatable=True,
        )
        return first_page([rows.schedule(row) for row in found], size, lambda last: last.name)

    async def read_schedule(self, name: str) -> Schedule | None:
        """Return one schedule; None for an unknown name."""
        found = await self._fetch(statements.READ_SCHEDULE, _name(name), repeatable=True)
        return rows.schedule(found[0]) if found else None

    async def schedule_as_due(self, name: str) -> DueSchedule | None:
        """Return a schedule as if it were due now, even if it is paused; None for an unknown name."""
        found = await self._fetch(
            statements.SCHEDULE_AS_DUE,
            _name(name),
            repeatable=True,
        )
        return rows.due_schedule({**found[0], "next_at": found[0]["now"]}) if found else None

    async def pause_schedule(self, name: str, *, expected: datetime | None = None) -> None:
        """Stop firing a schedule until it is resumed.

        With `expected`, a stored `updated_at`, it only changes a schedule that has not been changed or deleted since:
        `Contention` (`stale_definition`).
        """
        await self._existing(statements.PAUSE_SCHEDULE, name, expected)

    async def resume_schedule(
        self, name: str, *, next_at: datetime | None = None, expected: datetime | None = None
    ) -> None:
        """Fire a schedule again: from `next_at` on, or from where it was paused, catching up as its `catch_up` says.

        `expected` is that of `pause_schedule`.
        """
        following = None if next_at is None else moment(next_at, "next_at")
        await self._existing(statements.RESUME_SCHEDULE, name, expected, following)

    async def delete_schedule(self, name: str, *, expected: datetime | None = None) -> None:
        """Delete a schedule. Its executions stay. `expected` is that of `pause_schedule`."""
        await self._existing(statements.DELETE_SCHEDULE, name, expected)

    async def _existing(self, sql: str, name: str, expected: datetime | None, *args: Any) -> None:
        changed_at = None if expected is None else moment(expected, "expected")
        row = await self._row(sql, _name(name), *args, changed_at)
        if row["found"]:
            return
        if changed_at is None:
            raise NotFound("schedule", name)
        raise Contention("stale_definition", f"schedule {name!r} was changed or deleted after {changed_at}")

    async def due_schedules(self, *, limit: int = 100) -> list[DueSchedule]:
        """Return the schedules that are due, oldest first."""
        found = await self._fetch(statements.DUE_SCHEDULES, check_limit(limit, 1000))
        return [rows.due_schedule(row) for row in found]

    async def until_next_schedule(self) -> float | None:
        """Return the seconds until the next schedule fires; None if none will."""
        row = await self._row(statements.NEXT_SCHEDULE, repeatable=True)
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
        """Advance a schedule from `due_at` and create its executions, in one transaction; None if another process did.

        The latest of `items` becomes the schedule's last execution. Without items it only advances. Executions that a
        closed lane refuses are not created, and the schedule advances anyway.
        """
        check_batch(items)
        expected = moment(due_at, "due_at")
        following = None if next_at is None else moment(next_at, "next_at")
        if not items:
            return [] if await self._fetch(statements.SKIP_SCHEDULE, _name(name), expected, following) else None
        call = CreateCall(items, self._database.flow_partitions)
        if call.refused:
            raise call.refused[0]
        found = await self._fetch(
            statements.FIRE_SCHEDULE,
            *call.args,
            _name(name),
            expected,
            following,
            None if fired_at is None else moment(fired_at, "fired_at"),
        )
        if not found:
            return None
        verdicts = call.verdicts([tuple(row) for row in found])
        return [verdict.execution_id for verdict in verdicts if isinstance(verdict, Created | Duplicate)]


def _name(value: str, field: str = "name") -> str:
    name = check_text(value, field)
    if not name:
        raise InvalidInput("empty", field=field, allowed="a non-empty text")
    return name


def _json(value: object, field: str) -> str:
    """Return a mapping as JSON that the database can hold."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"got {type(value).__name__}", field=field, allowed="a mapping of JSON values")
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"not JSON: {error}", field=field, allowed="a mapping of JSON values") from None
    if ESCAPED_NUL.search(text):
        raise InvalidInput("contains NUL", field=field, allowed="text without NUL")
    return text
