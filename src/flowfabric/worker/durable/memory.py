"""The recorded steps of an execution, as one run of its handler reads them, and how exceptions are stored.

A step is identified by its kind, its name and the number of the use: how often the handler used the name before in this
run (0 for the first use; `n` in the records). Successes are kept over retries and crashes. A failure is kept within its
run, so that a handler that is woken takes the same branch, and a handler that is retried tries again.
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
        self.unanswered: set[tuple[str, int]] = set()  # waits that ended without a signal in this run, by name and use
        for step in steps:
            if step.error is None or step.run == run:
                self._known[step.kind, step.name, step.n] = step
            else:
                self._failed_before = True

    def next(self, name: str, kind: StepKind) -> tuple[int, Step | None]:
        """Return the number of this use of the name, and its recorded step."""
        use = self._uses[kind, name]
        self._uses[kind, name] = use + 1
        return use, self._known.get((kind, name, use))

    def known(self, name: str, kind: StepKind, use: int) -> Step | None:
        """Return the recorded step of an earlier use of the name."""
        return self._known.get((kind, name, use))

    def not_reached(self) -> list[tuple[str, int]]:
        """Return the steps that an earlier run recorded and this one did not reach, by name and use.

        Empty if a failure in an earlier run explains the different branch. An unused time or awaited result does no
        harm.
        """
        if self._failed_before:
            return []
        return sorted(
            (name, use)
            for kind, name, use in self._known
            if kind in ("step", "submit") and use >= self._uses.get((kind, name), 0)
        )


def check_name(name: object) -> str:
    """Check the name of a step."""
    checked = check_text(name, "name")
    if not checked:
        raise InvalidInput("empty", field="name", allowed="a non-empty text")
    return checked


SEALED = "[sealed]"


def encode_error(error: BaseException, *, sealed: bool) -> tuple[str, bytes | None]:
    """Return a step's exception for storage: its class and message, and separately its plain JSON attributes.

    `sealed`: the separate part passes the app's codecs, so the message goes there too.
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
    """Return the value if JSON returns it unchanged; else None."""
    try:
        text = msgspec.json.encode(value)
        return value if len(text) <= _MAX_VALUE and msgspec.json.decode(text) == value else None
    except Exception:  # a user's object that raises is not plain
        return None


def remembered_error(step: Step, details: bytes | None) -> Exception:
    """Return the exception of a failed step: of its own class if that is loaded, with its stored attributes."""
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
        except Exception:  # noqa: S110 - a class that cannot be created this way is described in the message
            pass
        else:
            return made
    return StepFailed(step.name, str(stored.get("type", "")), message)
