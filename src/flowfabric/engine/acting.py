"""Acting in a caller's name: one transaction, whose events carry the name and which adds a row to the audit log."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import asyncpg

from flowfabric._postgres import rows, statements
from flowfabric._postgres.bound import BoundDatabase
from flowfabric._postgres.database import LOST, translate
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_int, check_limit
from flowfabric.errors import FlowFabricError, InvalidInput, RetriesExhausted
from flowfabric.values.checks import check_text, escape_text, moment
from flowfabric.values.operator_audit import AuditEntry, AuditFilter
from flowfabric.values.page import Page

_log = logging.getLogger("flowfabric.server")
_MOST = 20_000  # rows of the audit log that one call looks at


@dataclass(kw_only=True)
class Actor:
    """Who acts, and what the audit log says about it. `target` may be set while the operation runs.

    Without `is_audited` the audit log gets no row.
    """

    name: str
    operation: str
    key_id: str | None = None
    address: str | None = None
    target: str | None = None
    request_id: str | None = None
    is_audited: bool = True


class Acting(Operations):
    """acting, write_operator_audit, list_operator_audit."""

    @contextlib.asynccontextmanager
    async def acting(self, actor: Actor) -> AsyncIterator[Self]:
        """Yield an engine that acts in a caller's name, in one transaction with the row of the audit log.

        The events it writes carry the actor's name. A refusal, an exception with a `kind` or a `code`, commits what it
        committed without this, and the row with that word as its outcome; so a crash leaves both or neither. Any other
        exception, and every error of the database, rolls back; the row is then written alone. After a deadlock it
        raises `RetriesExhausted` and writes no row: begin again.
        """
        refused: Exception | None = None
        async with contextlib.AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self._database.connection())
            except (asyncpg.PostgresError, *LOST) as error:
                raise translate(error, self._database.target) from error
            transaction = connection.transaction(isolation="read_committed")
            bound = BoundDatabase(self._database, connection)
            acts = copy.copy(self)
            acts._database = bound
            try:
                await transaction.start()
                await bound.fetch(statements.SET_ACTOR, (_text(actor.name) or "",))
                try:
                    yield acts
                except Exception as error:
                    refused = error
                    bound.is_broken = bound.is_broken or outcome_of(error) == "internal"
                if bound.is_broken:
                    await transaction.rollback()
                else:
                    await Acting.write_operator_audit(acts, actor, outcome_of(refused))
                    await transaction.commit()
            except (FlowFabricError, asyncpg.PostgresError, *LOST) as error:
                refused = translate(error, self._database.target)
                bound.is_broken = True
                with contextlib.suppress(asyncpg.PostgresError, *LOST):
                    if connection.is_in_transaction():
                        await transaction.rollback()
        if bound.is_broken and not isinstance(refused, RetriesExhausted):
            try:
                await self.write_operator_audit(actor, outcome_of(refused))
            except FlowFabricError as error:
                _log.warning("the audit log has no row of %s by %s: %s", actor.operation, actor.name, error)
        if refused is not None:
            raise refused

    @property
    def will_roll_back(self) -> bool:
        """Whether the transaction of `acting` cannot commit any more."""
        return isinstance(self._database, BoundDatabase) and self._database.is_broken

    def roll_back(self) -> None:
        """Make the transaction of `acting` roll back when it ends, whatever the outcome."""
        if isinstance(self._database, BoundDatabase):
            self._database.is_broken = True

    async def write_operator_audit(self, actor: Actor, outcome: str = "ok") -> None:
        """Write a row of the audit log."""
        if not isinstance(actor, Actor):
            raise InvalidInput(f"got {type(actor).__name__}", field="actor", allowed="an Actor")
        if actor.is_audited:
            await self._row(
                statements.WRITE_OPERATOR_AUDIT,
                _text(actor.name) or "",
                _text(actor.key_id),
                _text(actor.address),
                _text(actor.operation) or "",
                _text(actor.target, 1024),
                check_text(outcome, "outcome"),
                _text(actor.request_id),
            )

    async def list_operator_audit(
        self,
        filter: AuditFilter = AuditFilter(),  # noqa: A002, B008 - the contract's word; frozen
        *,
        before: int | None = None,
        limit: int = 100,
    ) -> Page[AuditEntry, int]:
        """Return rows of the audit log, newest first. `before` is the `next_cursor` of the page before.

        A call looks at a bounded number of rows: a page may have fewer than `limit`, or none, and still a next one.
        """
        if not isinstance(filter, AuditFilter):
            raise InvalidInput(f"got {type(filter).__name__}", field="filter", allowed="an AuditFilter")
        size = check_limit(limit, 1000)
        words = [
            None if value is None else check_text(value, f"filter.{name}", 1024)
            for name in ("actor", "key_id", "operation", "target", "outcome")
            for value in (getattr(filter, name),)
        ]
        times = [
            None if value is None else moment(value, f"filter.{name}")
            for name, value in (("since", filter.since), ("until", filter.until))
        ]
        upto = None if before is None else check_int(before, "before", 0, 2**63 - 1)
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_OPERATOR_AUDIT, *words, *times, upto, size, _MOST, repeatable=True)
        more = found[-1]["seq"] if found and found[-1]["at"] is None else None
        return Page([rows.audit_entry(row) for row in found if row["at"] is not None], more)


def outcome_of(error: Exception | None) -> str:
    """The word for how an operation ended: ok, the kind or code of a refusal, else internal."""
    if error is None:
        return "ok"
    word = error.kind if isinstance(error, FlowFabricError) else getattr(error, "code", None)
    return word if isinstance(word, str) else "internal"


def _text(value: str | None, most: int = 256) -> str | None:
    return None if value is None else escape_text(value, most)
