"""What is remembered of an execution's steps, as one run of its handler asks for it, and how exceptions are kept.

A step is known by its kind, its name and the number of the use: how often the handler used the name before in this run
(0 for the first use; `n` in the records). Successes are kept over
retries and crashes; a failure is kept within its run, so that a handler that is woken up takes the branch it took
before, and one that is retried tries again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from flowfabric.client.failure import type_name
from flowfabric.errors import InvalidInput, StepFailed
from flowfabric.values.checks import check_text, escape_text
from flowfabric.values.step import Step, StepKind

_MAX_TEXT = 4096
_MAX_VALUE = 16 * 1024


class Memory:
    """The steps of one execution. Made once per run of the handler."""

    def __init__(self, steps: Iterable[Step] = (), run: int = 0) -> None:
        self._uses: Counter[tuple[StepKind, str]] = Counter()
        self._known: dict[tuple[StepKind, str, int], Step] = {}
        self._failed_before = False
        self.unanswered: set[tuple[str, int]] = set()  # waits by name and use that ended without a signal in this run
        for step in steps:
            if step.error is None or step.run == run:
                self._known[step.kind, step.name, step.n] = step
            else:
                self._failed_before = True

    def next(self, name: str, kind: StepKind) -> tuple[int, Step | None]:
        """The number of this use of the name, and what is remembered of it."""
        use = self._uses[kind, name]
        self._uses[kind, name] = use + 1
        return use, self._known.get((kind, name, use))

    def known(self, name: str, kind: StepKind, use: int) -> Step | None:
        """What is remembered of a use of the name that was asked for before."""
        return self._known.get((kind, name, use))

    def not_reached(self) -> list[tuple[str, int]]:
        """What an earlier run did and this one did not ask for, by name and use.

        Empty when a failure in an earlier run explains that it went another way. A time or a result that is not asked
        for any more harms nobody.
        """
        if self._failed_before:
            return []
        return sorted(
            (name, use)
            for kind, name, use in self._known
            if kind in ("step", "submit") and use >= self._uses.get((kind, name), 0)
        )


def check_name(name: object) -> str:
    """The name of a step as a handler gives it."""
    checked = check_text(name, "name")
    if not checked:
        raise InvalidInput("empty", field="name", allowed="a non-empty text")
    return checked


SEALED = "[sealed]"


def encode_error(error: BaseException, *, sealed: bool) -> tuple[str, bytes | None]:
    """A step's exception as it is stored: its class and its words, and, apart, as much of it as is plain JSON.

    `sealed`: the part that is kept apart passes the app's codecs, so the words go there too.
    """
    words = escape_text(error, _MAX_TEXT)
    stored = {
        "type": escape_text(type_name(error), 256),
        "module": escape_text(type(error).__module__, 256),
        "name": escape_text(type(error).__qualname__, 256),
        "message": SEALED if sealed else words,
    }
    args = _plain(list(error.args))
    attributes = {name: value for name, given in vars(error).items() if (value := _plain(given)) is not None}
    is_plain = args is not None or bool(attributes) or sealed
    kept = {"args": args, "attributes": attributes, **({"message": words} if sealed else {})}
    details = msgspec.json.encode(kept) if is_plain else None
    return msgspec.json.encode(stored).decode(), details


def _plain(value: Any) -> Any:
    """The value, if JSON gives it back as it is; else None."""
    try:
        text = msgspec.json.encode(value)
        return value if len(text) <= _MAX_VALUE and msgspec.json.decode(text) == value else None
    except Exception:  # an object of somebody else's: whatever is wrong with it, it is not plain
        return None


def remembered_error(step: Step, details: bytes | None) -> Exception:
    """The exception a step failed with: of its own class where that is loaded, with what was kept of it."""
    stored: dict[str, Any] = step.error or {}
    try:
        kept = {} if details is None else msgspec.json.decode(details)
    except msgspec.DecodeError:
        kept = {}
    message = str(kept.get("message", stored.get("message", "")))
    cls: Any = sys.modules.get(stored.get("module", ""))
    for part in str(stored.get("name", "")).split("."):
        cls = getattr(cls, part, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            args = kept.get("args")
            made = cls.__new__(cls, *(() if args is None else args))
            made.args = (message,) if args is None else tuple(args)
            made.__dict__.update(kept.get("attributes") or {})
            str(made)
        except Exception:  # noqa: S110 - a class that cannot be made like this is told in words
            pass
        else:
            return made
    return StepFailed(step.name, str(stored.get("type", "")), message)
