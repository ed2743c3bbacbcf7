"""Pages of lists, and the filter of readers and duties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import Struct

_Item = TypeVar("_Item")
_Cursor = TypeVar("_Cursor")


class Page(Struct, Generic[_Item, _Cursor], frozen=True):
    """One page of a list. `next_cursor` is set if there may be more after it."""

    items: Sequence[_Item]
    next_cursor: _Cursor | None = None


class ScannerFilter(Struct, frozen=True, kw_only=True):
    """Restricts duties and readers: every field that is set must match exactly."""

    namespace: str | None = None
    instance_tag: tuple[str, str] | None = None
