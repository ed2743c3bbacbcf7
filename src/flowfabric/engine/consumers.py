"""Durable consumers: a cursor in the database that moves in the transaction of the effects."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import asyncpg

from flowfabric._postgres import statements
from flowfabric._postgres.database import LOST, translate
from flowfabric._postgres.rows.values import json_of
from flowfabric.engine.checks import check_duration, check_int, most_rows, to_json
from flowfabric.engine.events import Choice, Events, check_cursor, choice_of
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, TransportError
from flowfabric.values.checks import check_text
from flowfabric.values.consumer import ConsumerRecord
from flowfabric.values.event import FAMILY_BITS, HEARTBEATS, Event, EventCursor
from flowfabric.values.page import ScannerFilter

_T = TypeVar("_T")
Handler = Callable[[Any, Sequence[Any]], Awaitable[None]]
_MOST_FILTER = 4000  # bytes; the database takes 4,096, with its own spaces
_CANCELLED = "the function raised CancelledError, though the consumer was not cancelled"
_ENDED = "the function ended the transaction that it was called in"


class Consumed(NamedTuple):
    """The result of one transaction of a consumer.

    `code` is taken, held (another process works) or busy (its transaction is open). `left`: for how long it is held.
    """

    code: str
    handled: int
    cursor: EventCursor
    at_end: bool
    left: timedelta


class Consumers(Events):
    """register_consumer, consume, leave_consumer, list_consumers, set_consumer, delete_consumer."""

    async def register_consumer(
        self,
        name: str,
        *,
        families: Sequence[str] | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
        start: EventCursor | None = None,
        heartbeats: bool = False,
        redefine: bool = False,
    ) -> EventCursor:
        """Create a durable consumer, which begins after `start`, or now. Returns its cursor, even if it exists.

        `InvalidInput` if it exists and takes other events, unless `redefine`: its cursor stays then.
        """
        chosen = choice_of(families, filter, heartbeats=heartbeats)
        position = (None, None) if start is None else check_cursor(start)
        if redefine not in (True, False):
            raise InvalidInput(f"got {redefine!r}", field="redefine", allowed="True or False")
        stored = to_json(_stored(chosen))
        if len(stored.encode()) > _MOST_FILTER:
            raise InvalidInput("too long to be stored", field="filter", allowed=f"{_MOST_FILTER:,} bytes as JSON")
        row = await self._row(
            statements.REGISTER_CONSUMER,
            _name(name),
            chosen.families,
            stored,
            *position,
            redefine,
            repeatable=True,
        )
        if row["code"] == "different":
            raise _differs(name, row["families"], json_of(row, "filter"), chosen)
        return EventCursor(row["log_position"], row["log_epoch"])

    async def consume(
        self,
        name: str,
        handle: Handler,
        *,
        make: Callable[[Event], Any] | None = None,
        limit: int = 100,
        held_for: timedelta = timedelta(seconds=15),
        takes: Choice | None = None,
    ) -> Consumed:
        """Hand up to `limit` events after a consumer's cursor to a function, and move the cursor, in one transaction.

        The function gets the connection, in that transaction, and the events. If it raises, nothing has happened.
        Returns without calling it if another process works for this consumer. `InvalidInput` if the consumer was
        redefined, and no longer takes what `takes` says.
        """
        size = check_int(limit, "limit", 1, 10_000)
        ms = check_duration(held_for, "held_for", most=timedelta(minutes=1))
        known = _name(name)
        failed: Exception
        try:
            async with self._database.connection() as connection:
                try:
                    async with connection.transaction(isolation="read_committed"):
                        return await self._consume(connection, known, handle, make, size, ms, takes)
                except _Raised as raised:
                    # An error that a function raises without its connection comes from the loss of the connection.
                    failed, is_lost = raised.error, connection.is_closed()
                except Exception as error:
                    failed, is_lost = error, isinstance(error, LOST)
        except LOST as error:
            failed, is_lost = error, True
        if not is_lost:
            raise failed
        if isinstance(failed, FlowFabricError):
            # Another error than the one that the function raised: this one says that the connection was lost.
            raise TransportError("transport", str(failed)) from failed
        raise translate(failed, self._database.target) from failed

    async def _consume(
        self,
        connection: asyncpg.Connection[Any],
        name: str,
        handle: Handler,
        make: Callable[[Event], Any] | None,
        limit: int,
        ms: int,
        takes: Choice | None,
    ) -> Consumed:
        (taken,) = await self._ask(
            connection, statements.TAKE_CONSUMER, name, self._instance, ms, socket.gethostname(), os.getpid()
        )
        if taken["code"] == "missing":
            raise NotFound("consumer", name)
        cursor = EventCursor(taken["log_position"] or 0, taken["log_epoch"] or 0)
        left = timedelta(milliseconds=taken["left_ms"] or 0)
        if taken["code"] != "taken":
            return Consumed(taken["code"], 0, cursor, True, left)
        stored = json_of(taken, "filter")
        chosen = _chosen(taken["families"], stored)
        if takes is not None and (taken["families"], stored) != (takes.families, _stored(takes)):
            raise _differs(name, taken["families"], stored, takes)
        page = self._page(
            await self._ask(connection, statements.READ_EVENTS, *self._log_arguments((chosen,), cursor, limit)), cursor
        )
        if page.events:
            made = page.events if make is None else [make(event) for event in page.events]
            try:
                await handle(connection, made)
                if not connection.is_in_transaction():
                    raise RuntimeError(_ENDED)
            except Exception as error:
                raise _Raised(error) from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise _Raised(RuntimeError(_CANCELLED)) from error
        if page.cursor != cursor:
            arguments = (name, self._instance, page.cursor.position, page.cursor.epoch, len(page.events))
            try:
                (moved,) = await self._ask(connection, statements.MOVE_CONSUMER, *arguments)
            except TransportError as error:
                if isinstance(error.__cause__, asyncpg.InFailedSQLTransactionError):
                    raise _Raised(
                        RuntimeError(
                            "the function caught an error of the database, after which its transaction cannot commit;"
                            " run what may fail in a savepoint: async with connection.transaction()"
                        )
                    ) from error
                raise
            if not moved["moved"]:
                raise _Raised(RuntimeError(_ENDED))
        return Consumed("taken", len(page.events), page.cursor, page.at_end, left)

    async def _ask(self, connection: asyncpg.Connection[Any], sql: str, *args: Any) -> list[asyncpg.Record]:
        try:
            return list(await connection.fetch(sql, *args))
        except (asyncpg.PostgresError, *LOST, TimeoutError) as error:
            raise translate(error, self._database.target) from error

    async def fail_consumer(self, name: str, failure: str) -> None:
        """Note that the function of a consumer failed, for lists."""
        text = failure.replace("\x00", "").encode("utf-8", "replace").decode()
        await self._row(statements.FAIL_CONSUMER, _name(name), self._instance, text)

    async def leave_consumer(self, name: str) -> None:
        """Let another process work for a consumer at once."""
        await self._row(statements.LEAVE_CONSUMER, _name(name), self._instance, repeatable=True)

    async def list_consumers(self, *, after: str | None = None, limit: int | None = None) -> list[ConsumerRecord]:
        """All durable consumers by name, with how far behind they are and which process works.

        With a `limit` at most that many, after the one with the name `after`.
        """
        found = await self._fetch(
            statements.LIST_CONSUMERS,
            None if after is None else check_text(after, "after"),
            most_rows(limit),
            repeatable=True,
        )
        return [
            ConsumerRecord(
                name=row["name"],
                families=_families(row["families"]),
                filter=json_of(row, "filter"),
                cursor=EventCursor(row["log_position"], row["log_epoch"]),
                lag=row["lag"],
                behind_since=row["next_at"],
                is_expired=row["is_expired"],
                handled=row["handled"],
                created_at=row["created_at"],
                moved_at=row["moved_at"],
                failures=row["failures"],
                failure=row["failure"],
                instance=row["instance"],
                host=None if row["instance"] is None else row["host"],
                pid=None if row["instance"] is None else row["pid"],
                retention=row["retention"],
            )
            for row in found
        ]

    async def set_consumer(self, name: str, cursor: EventCursor | None) -> None:
        """Move a consumer to another cursor, or to the end of the log (None). For operators.

        A function that runs ends first. `NotFound` if it does not exist, `CursorRefused` if events after the cursor are
        missing.
        """
        position = (None, None) if cursor is None else check_cursor(cursor)
        row = await self._row(statements.SET_CONSUMER, _name(name), *position)
        if not row["moved"]:
            raise NotFound("consumer", name)

    async def delete_consumer(self, name: str) -> bool:
        """Forget a consumer and its cursor; False if it does not exist. For operators."""
        return bool((await self._row(statements.DELETE_CONSUMER, _name(name)))["deleted"])


def describe(families: int, chosen: dict[str, Any]) -> str:
    """Which events a consumer takes, in one line."""
    return ", ".join([" and ".join(_families(families)), *(f"{key} {value!r}" for key, value in chosen.items())])


class _Raised(Exception):
    """The function of a consumer raised this."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(error)


def _differs(name: str, families: int, stored: dict[str, Any], chosen: Choice) -> InvalidInput:
    return InvalidInput(
        f"consumer {name} exists and takes other events: {describe(families, stored)}",
        field="families" if families != chosen.families else "filter",
        allowed="what it takes, another name, or redefine=True",
    )


def _name(name: object) -> str:
    if not check_text(name, "name"):
        raise InvalidInput("empty", field="name", allowed="a name that is not empty")
    return str(name)


def _families(bits: int) -> tuple[str, ...]:
    named = tuple(family for family, bit in FAMILY_BITS.items() if bits & bit)
    return (*named, "heartbeat") if bits & HEARTBEATS else named


def _stored(chosen: Choice) -> dict[str, Any]:
    """A filter as it is stored: the parts that are set."""
    tag = None if chosen.tag_key is None else [chosen.tag_key, chosen.tag_value]
    parts = {
        "namespace": chosen.namespace,
        "tag": tag,
        "flow_id": None if chosen.flow_id is None else str(chosen.flow_id),
        "execution_id": None if chosen.execution_id is None else str(chosen.execution_id),
        "kind": chosen.kind,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _chosen(families: int, stored: dict[str, Any]) -> Choice:
    key, value = stored.get("tag") or (None, None)
    return Choice(
        families,
        stored.get("namespace"),
        key,
        value,
        stored.get("flow_id"),
        stored.get("execution_id"),
        stored.get("kind"),
    )
