"""Lists that the engine returns in pages: their options, and the loop that reads the first items."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from flowfabric.engine.reads import Place
    from flowfabric.values.page import Page

Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=100_000, help="List at most this many.")]
Cursor = Annotated[
    str | None,
    typer.Option("--cursor", metavar="CURSOR", help="Continue where an earlier list ended.", show_default=False),
]
PAGE = 1000

_T = TypeVar("_T")
_C = TypeVar("_C", bound="str | Place | UUID | tuple[str, str] | tuple[datetime, str]")


async def up_to(
    limit: int, fetch: Callable[[_C | None, int], Awaitable[Page[_T, _C]]], cursor: _C | None = None
) -> tuple[list[_T], _C | None]:
    """The first `limit` items from `cursor` on, and the cursor of the rest. `fetch` takes a cursor and a size."""
    found: list[_T] = []
    while True:
        page = await fetch(cursor, min(limit - len(found), PAGE))
        found += page.items
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            return found, cursor
