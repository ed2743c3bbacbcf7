"""How the nodes before an `ff.all_settled` join ended, as the node after it receives them."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")


class Succeeded(Struct, Generic[T], frozen=True, tag="succeeded", tag_field="outcome"):
    """It returned this value."""

    value: T


class Failed(Struct, frozen=True, tag="failed", tag_field="outcome"):
    """It failed for good. `error_type` is the class of the exception, if there was one."""

    message: str
    error_type: str | None = None
    category: str | None = None


class Expired(Struct, frozen=True, tag="expired", tag_field="outcome"):
    """Its deadline passed, or a wait with `on_timeout="expire"` did."""

    message: str
    error_type: str | None = None
    category: str | None = None


class Cancelled(Struct, frozen=True, tag="cancelled", tag_field="outcome"):
    """It was cancelled."""

    reason: str


class Skipped(Struct, frozen=True, tag="skipped", tag_field="outcome"):
    """It never ran, because a node before it did not succeed."""


Settled: TypeAlias = Succeeded[T] | Failed | Expired | Cancelled | Skipped
"""The outcome of a node that returns a `T`. A parameter that takes `ff.all_settled(...)` is a `list[ff.Settled[T]]`."""
