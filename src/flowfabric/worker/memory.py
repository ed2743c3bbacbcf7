"""What is remembered of an execution's steps, as one run of its handler asks for it.

A step is known by its name and by how often the name was used before in this run. Successes are kept over retries and
crashes; a failure is kept within its run, so that a handler that is woken up takes the branch it took before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from flowfabric.client.failure import type_name
from flowfabric.errors import InvalidInput, StepFailed
from flowfabric.ids import check_text
from flowfabric.models import Step

_MAX_MESSAGE = 4096


class Memory:
    """The steps of one execution. Made once per run of the handler."""

    def __init__(self, steps: Iterable[Step] = (), run: int = 0) -> None:
        self._uses: Counter[str] = Counter()
        self._known: dict[tuple[str, int], Step] = {}
        self._failed_before = False
        for step in steps:
            if step.error is None or step.run == run:
                self._known[step.name, step.n] = step
            else:
                self._failed_before = True

    def next(self, name: str, kind: str) -> tuple[int, Step | None]:
        """The number of this use of the name, and what is remembered of it."""
        check_text(name, "name")
        if not name:
            raise InvalidInput("empty", field="name", allowed="a non-empty text")
        n = self._uses[name]
        self._uses[name] = n + 1
        known = self._known.get((name, n))
        if known is not None and known.kind != kind:
            raise InvalidInput(
                f"{name!r} was used for a {known.kind} before and for a {kind} now",
                field="name",
                allowed="one name per thing",
            )
        return n, known

    def not_reached(self) -> list[str]:
        """Names that an earlier run used and this one did not; empty when a failure explains another way."""
        if self._failed_before:
            return []
        # A time that is not asked for any more harms nobody.
        did = {name for (name, _), step in self._known.items() if step.kind in ("step", "submit")}
        return sorted(did - self._uses.keys())


def encode_error(error: BaseException) -> str:
    """A step's exception as it is stored."""
    try:
        args = msgspec.json.decode(msgspec.json.encode(list(error.args)))
        if args != list(error.args) or len(str(args)) > _MAX_MESSAGE:
            args = None
    except (TypeError, ValueError, UnicodeError, OverflowError, RecursionError):
        args = None
    stored = {
        "type": type_name(error),
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "message": str(error)[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode().replace("\0", "\\0"),
        "args": args,
    }
    return msgspec.json.encode(stored).decode()


def remembered_error(step: Step) -> Exception:
    """The exception a step failed with: of its own class where that is loaded and its arguments are known."""
    stored: dict[str, Any] = step.error or {}
    cls: Any = sys.modules.get(stored.get("module", ""))
    for part in str(stored.get("name", "")).split("."):
        cls = getattr(cls, part, None)
    if isinstance(cls, type) and issubclass(cls, Exception) and stored.get("args") is not None:
        try:
            made = cls.__new__(cls, *stored["args"])
            made.args = tuple(stored["args"])
        except Exception:  # noqa: S110 - a class that cannot be made like this is told in words
            pass
        else:
            return made
    return StepFailed(step.name, str(stored.get("type", "")), str(stored.get("message", "")))
