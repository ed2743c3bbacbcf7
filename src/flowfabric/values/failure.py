"""Failure classes, how a category maps to one, and groups of failures."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import escape_text
from flowfabric.values.ids import ExecutionId
from flowfabric.values.state import State


class FailureClass(StrEnum):
    """The kind of failure that ended an attempt; `permanent` and `cancelled` are never retried."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INFRA_CRASH = "infra_crash"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


_CLASS_NAMES: Final = frozenset(FailureClass)


def classify(category: str | None, failure_class: str | None = None) -> tuple[FailureClass, str]:
    """Return the failure class and category to record, each derived from the other if absent.

    A category is free text and never refused: text the database cannot hold is escaped or cut.
    """
    category = escape_text(category, 256) if category else None
    if failure_class:
        try:
            known = FailureClass(failure_class)
        except ValueError:
            raise InvalidInput(
                f"not a failure class: {failure_class!a}",
                field="failure_class",
                allowed=", ".join(FailureClass),
            ) from None
    elif category is not None and category in _CLASS_NAMES:
        known = FailureClass(category)
    else:
        known = FailureClass.TRANSIENT
    return known, category or known.value


class FailureGroup(Struct, frozen=True, kw_only=True):
    """Executions that ended alike: of one kind, state and error type, with the same text but for ids and numbers.

    `last_execution_id` ended last, at `last_ended_at`; `last_text` is its failure in one line.
    """

    execution_kind: str
    public_state: State
    error_type: str | None
    message: str
    count: int
    last_ended_at: datetime
    last_execution_id: ExecutionId
    last_text: str


class Failures(Struct, frozen=True, kw_only=True):
    """Groups of failures, the largest first, of the `examined` that ended last; `is_complete`: these are all."""

    groups: tuple[FailureGroup, ...]
    examined: int
    is_complete: bool
