"""Limits by name, what they hold and what they denied, and the declarations of an app that were stored last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TypeVar
from uuid import UUID

import msgspec

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.checks import (
    check_batch,
    check_bool,
    check_int,
    check_limit,
    check_list,
    check_low_water,
    check_tag,
)
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.binding import Bind, Binding
from flowfabric.values.checks import check_lane, check_text, moment
from flowfabric.values.held import Denial, Denials, Held, HeldCount
from flowfabric.values.ids import ExecutionId, FlowId, parse_execution_id, parse_flow_id, parse_uuid
from flowfabric.values.page import Page
from flowfabric.values.spending import FoundLimit, check_limit_name

_Place = TypeVar("_Place")


class LimitLookups(Operations):
    """find_limits, list_held, read_held, count_held, count_denials, read_denials, bind_limit, unbind_limit.

    find_unreported_budgets, read_declared_limits, note_declared_limits, list_bindings.
    """

    async def find_limits(self, budgets: Sequence[str], quotas: Sequence[str]) -> list[FoundLimit]:
        """Return the budgets and quotas with these names, up to 1,000 of each; unknown names are left out."""
        found = await self._fetch(
            statements.FIND_LIMITS, _names(budgets, "budgets"), _names(quotas, "quotas"), repeatable=True
        )
        return [FoundLimit(what=row["what"], name=row["name"], id=row["id"], key=row["key"]) for row in found]

    async def list_held(
        self,
        limit_id: UUID,
        *,
        key: str | None = None,
        namespace: str | None = None,
        lane_ids: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        tag: tuple[str, str] | None = None,
        flow_id: FlowId | None = None,
        parent_id: ExecutionId | None = None,
        created_from: datetime | None = None,
        created_before: datetime | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[Held, str]:
        """Return the executions that a budget or quota policy holds, in the order in which it releases them.

        `key`: only of this value of a policy's key. The other filters are those of `find_executions`.
        """
        target = parse_uuid(limit_id, "limit_id")
        size = check_limit(limit, 1000)
        wanted = None if key is None else check_text(key, "key")
        place = (None, None, None, None) if cursor is None else _place(cursor, tuple[str, int, datetime, UUID])
        filters = (
            None if namespace is None else check_text(namespace, "namespace"),
            None if lane_ids is None else [check_lane(lane, "lane_ids") for lane in check_list(lane_ids, "lane_ids")],
            None if kinds is None else [check_text(kind, "kinds") for kind in check_list(kinds, "kinds")],
            *check_tag(tag, "tag"),
            None if flow_id is None else parse_flow_id(flow_id),
            None if parent_id is None else parse_execution_id(parent_id, "parent_id"),
            None if created_from is None else moment(created_from, "created_from"),
            None if created_before is None else moment(created_before, "created_before"),
        )
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_HELD, target, wanted, *place, size + 1, *filters, repeatable=True)
        return first_page(
            [rows.held(row) for row in found],
            size,
            lambda last: msgspec.json.encode((last.key, last.rank, last.created_at, last.execution_id)).decode(),
        )

    async def read_held(self, execution_id: ExecutionId) -> Held | None:
        """Return which limit holds an execution; None if none does."""
        found = await self._fetch(statements.READ_HELD, *self._at(parse_execution_id(execution_id)), repeatable=True)
        return rows.held(found[0]) if found else None

    async def count_held(self, *, limit: int = 10_000) -> list[HeldCount]:
        """Return how many executions limits hold, by lane and limit; at most `limit` are counted."""
        found = await self._fetch(statements.COUNT_HELD, check_int(limit, "limit", 1, 1_000_000), repeatable=True)
        return [
            HeldCount(
                lane_id=row["lane"], limit_id=row["limit_id"], what=row["what"], name=row["name"], count=row["held"]
            )
            for row in found
        ]

    async def count_denials(self, *, limit: int = 1000, low_water: datetime | None = None) -> list[Denial]:
        """Add up to `limit` denials of claims to the totals, and return them. The duty `unblock` calls it.

        `low_water`: denials from before it are passed over.
        """
        found = await self._fetch(
            statements.COUNT_DENIALS,
            check_int(limit, "limit", 1, 10_000),
            check_low_water(low_water),
        )
        return [
            Denial(
                denied_at=row["denied_at"],
                lane_id=row["lane"],
                reason=row["reason"],
                dimension=row["dimension"],
                count=row["count"],
            )
            for row in found
        ]

    async def read_denials(self) -> Denials:
        """Return how many executions claims moved aside since the schema was created, by reason.

        An execution counts each time a claim finds its limit closed. Refused reports and refused calls of
        `check_admission` are not in it: their callers know.
        """
        found = {
            (row["reason"], row["dimension"]): row["count"]
            for row in await self._fetch(statements.READ_DENIALS, repeatable=True)
        }
        return Denials(
            budgets={dimension: count for (reason, dimension), count in found.items() if reason == "budget"},
            rate=found.get(("rate", ""), 0),
            concurrency=found.get(("concurrency", ""), 0),
        )

    async def find_unreported_budgets(self, *, limit: int = 100) -> list[str]:
        """Return the names of budgets that ended executions had and that no call ever reported usage to."""
        found = await self._fetch(statements.FIND_UNREPORTED, check_int(limit, "limit", 1, 1000), repeatable=True)
        return [row["name"] for row in found]

    async def read_declared_limits(self, names: Sequence[str]) -> dict[str, str]:
        """Return the digests of the declarations that were stored last, by name."""
        found = await self._fetch(statements.READ_DECLARED_LIMITS, _names(names, "names"), repeatable=True)
        return {row["name"]: row["digest"] for row in found}

    async def note_declared_limits(self, digests: Mapping[str, str]) -> None:
        """Note that declarations were stored: a worker with the same ones leaves the limits as operators set them."""
        if not isinstance(digests, Mapping):
            raise InvalidInput(f"got {type(digests).__name__}", field="digests", allowed="digests by name")
        names = _names(list(digests), "digests")
        words = [check_text(digests[name], "digests") for name in names]
        await self._fetch(statements.NOTE_DECLARED_LIMITS, names, words, repeatable=True)

    async def bind_limit(self, limit_id: UUID, bind: Bind, *, is_declared: bool = False) -> bool:
        """Give a budget or quota to all submissions of this scope from now on. False if it was bound before.

        Existing executions keep their limits. `is_declared`: the code of an app declares it, and removes it when it no
        longer does.
        """
        target = parse_uuid(limit_id, "limit_id")
        row = await self._row(
            statements.BIND_LIMIT, target, *_scope(bind), check_bool(is_declared, "is_declared"), repeatable=True
        )
        if row["code"] == "not_found":
            raise NotFound("limit", detail=f"there is no budget or quota {target}")
        if row["code"] == "owned":
            raise InvalidInput(
                f"the budget {target} belongs to one run",
                field="limit_id",
                allowed="a budget without an owner, or a quota",
            )
        return bool(row["code"] == "bound")

    async def unbind_limit(self, limit_id: UUID, bind: Bind) -> bool:
        """Remove a binding; False if there was none. Existing executions keep their limits."""
        target = parse_uuid(limit_id, "limit_id")
        row = await self._row(statements.UNBIND_LIMIT, target, *_scope(bind), repeatable=True)
        return bool(row["existed"])

    async def list_bindings(
        self, *, limit_id: UUID | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[Binding, str]:
        """Return which submissions get which limits; with `limit_id` only those of this budget or quota."""
        target = None if limit_id is None else parse_uuid(limit_id, "limit_id")
        size = check_limit(limit, 1000)
        place = (None, None) if cursor is None else _place(cursor, tuple[UUID, UUID])
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_BINDINGS, target, *place, size + 1, repeatable=True)
        return first_page(
            [rows.binding(row) for row in found],
            size,
            lambda last: msgspec.json.encode((last.limit_id, last.binding_id)).decode(),
        )


def _scope(bind: object) -> tuple[str | None, ...]:
    if not isinstance(bind, Bind):
        raise InvalidInput(f"got {type(bind).__name__}", field="bind", allowed="a Bind")
    return bind.lane, bind.kind, bind.namespace, *(bind.tag or (None, None)), bind.flow


def _place(cursor: object, form: type[_Place]) -> _Place:
    try:
        return msgspec.json.decode(check_text(cursor, "cursor", 2048), type=form)
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise InvalidInput(f"got {cursor!r}", field="cursor", allowed="the next_cursor of a page") from None


def _names(given: Sequence[str], field: str) -> list[str]:
    check_batch(given, field)
    return [check_limit_name(name, field) for name in given]
