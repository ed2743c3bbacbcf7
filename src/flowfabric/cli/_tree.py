"""Executions with everything that they submitted below them."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flowfabric.cli import _output
from flowfabric.cli._output import Column
from flowfabric.cli._pages import PAGE
from flowfabric.contracts import json_form
from flowfabric.values.page import Page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flowfabric.cli._filters import Filter
    from flowfabric.engine import Engine
    from flowfabric.engine.reads import Place
    from flowfabric.values.child import Child
    from flowfabric.values.execution import ExecutionInfo

_MOST = 10_000  # rows below all of them
COLUMNS = (Column("NAME", cut=24), Column("STATE"), Column("ID"), Column("ARGUMENTS", cut=12, drop=1))
_NUMBER = re.compile(r"(\d+)")


class Roots:
    """Pages of executions that are below no other: those that a handler submitted are listed with its execution."""

    def __init__(self, engine: Engine, wanted: Filter) -> None:
        self._engine = engine
        self._wanted = wanted
        self._exists: dict[UUID, bool] = {}
        self._flows: dict[UUID, UUID | None] = {}  # the executions that submitted them

    async def page(self, cursor: Place | None, size: int) -> Page[ExecutionInfo, Place]:
        found = await self._wanted.page(self._engine, cursor, size)
        roots = tuple([one for one in found.items if not await self._is_below(one)])
        return Page(roots, found.next_cursor)

    async def _is_below(self, one: ExecutionInfo) -> bool:
        parent: UUID | None = one.parent_id
        if parent is None and one.flow_id is not None:
            if one.flow_id not in self._flows:
                flow = await self._engine.describe_flow(one.flow_id)
                self._flows[one.flow_id] = None if flow is None else flow.parent_id
            parent = self._flows[one.flow_id]
        if parent is None:
            return False
        if parent not in self._exists:
            self._exists[parent] = await self._engine.read_execution_info(parent) is not None  # type: ignore[arg-type]
        return self._exists[parent]


class Tree:
    """Those of the executions that are not below another one, and their children below them."""

    def __init__(self, found: Sequence[ExecutionInfo], listed: Sequence[Child]) -> None:
        self._below: dict[UUID, dict[UUID, Child]] = defaultdict(dict)
        for one in sorted(listed, key=_order):
            self._below[one.parent_id][one.id] = one
        inner = {one.id for one in listed}
        self._roots = [one for one in found if one.execution_id not in inner]
        self.is_cut = len(listed) == _MOST

    @classmethod
    async def read(cls, engine: Engine, found: Sequence[ExecutionInfo]) -> Tree:
        ids = [one.execution_id for one in found]
        listed: list[Child] = []
        for start in range(0, len(ids), PAGE):
            listed += await engine.list_children(ids[start : start + PAGE], deep=True, limit=_MOST)
        return cls(found, listed[:_MOST])

    def rows(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        for root in self._roots:
            name = f"{root.node}: {root.execution_kind}" if root.node else root.execution_kind
            rows.append((name, root.public_state, root.execution_id, root.arguments))
            rows += self._lines(root.execution_id, "")
        return rows

    def _lines(self, of: UUID, indent: str) -> Iterator[tuple[object, ...]]:
        children = list(self._below.get(of, {}).values())
        for place, one in enumerate(children):
            is_last = place == len(children) - 1
            name = f"flow {one.name}" if one.kind == "flow" else f"{one.node}: {one.name}" if one.node else one.name
            yield f"{indent}{'└─ ' if is_last else '├─ '}{name}", one.state, one.id, one.arguments
            yield from self._lines(one.id, indent + ("   " if is_last else "│  "))

    def as_json(self) -> list[dict[str, Any]]:
        return [{"execution": root, "children": self._nested(root.execution_id)} for root in self._roots]

    def _nested(self, of: UUID) -> list[dict[str, Any]]:
        return [
            {**json_form.to_json(one), "children": self._nested(one.id)} for one in self._below.get(of, {}).values()
        ]

    def show(self, *, wide: bool = False) -> None:
        if rows := self.rows():
            _output.table(COLUMNS, rows, wide=wide)
        if self.is_cut:
            _output.note(f"the first {_MOST:,} are shown: list fewer, with --parent or --limit")


def _order(one: Child) -> tuple[Any, ...]:
    """By time; the nodes of a flow, which are created together, by name, with their numbers as numbers."""
    parts = _NUMBER.split(one.node or "")
    return (one.depth, one.created_at, [int(part) if at % 2 else part for at, part in enumerate(parts)], one.id)
