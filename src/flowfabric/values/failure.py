"""Failure classes, and how a category maps to one."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import escape_text


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
