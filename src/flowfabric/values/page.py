"""Pages of lists, the loop that reads a whole list, and the filter of readers and duties."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

_Item = TypeVar("_Item")
_Cursor = TypeVar("_Cursor")
_SIZE = 1000


class Page(Struct, Generic[_Item, _Cursor], frozen=True):
    """One page of a list. `next_cursor` is set if there may be more after it."""

    items: Sequence[_Item]
    next_cursor: _Cursor | None = None


async def everything(fetch: Callable[[_Cursor | None, int], Awaitable[Page[_Item, _Cursor]]]) -> list[_Item]:
    """All items of a list. `fetch` takes a cursor and a size."""
    found: list[_Item] = []
    cursor: _Cursor | None = None
    while True:
        page = await fetch(cursor, _SIZE)
        found += page.items
        if page.next_cursor is None:
            return found
        cursor = page.next_cursor


class ScannerFilter(Struct, frozen=True, kw_only=True):
    """Restricts duties and readers: every field that is set must match exactly."""

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None
