"""The recorded steps of an execution, as one run of its handler reads them, and how exceptions are stored.

A step is identified by its kind, its name and the number of the use: how often the handler used the name before in this
run (0 for the first use; `n` in the records). Successes are kept over retries and crashes. A failure is kept within its
run, so that a handler that is woken takes the same branch, and a handler that is retried tries again.

A run that has not asked for everything that earlier runs recorded (`missing`) and asks for something new was changed,
unless an earlier run took another branch after a failure.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from flowfabric.client.failure import type_name
from flowfabric.errors import InvalidInput, StepFailed
from flowfabric.values.checks import check_text, escape_text
from flowfabric.values.step import BRANCHED, Step, StepKind

_MAX_TEXT = 4096
_MAX_VALUE = 16 * 1024


# Kinds that a changed handler must not leave out. An unused time, result or patch does no harm.
_EFFECTS: frozenset[StepKind] = frozenset(("step", "submit", "wait"))


class Request(NamedTuple):
    """What a handler asks for: its kind, its recorded name, the number of the use, and the recorded step."""

    kind: StepKind
    name: str
    use: int
    known: Step | None

    def __str__(self) -> str:
        return describe(self.kind, self.name, self.use)


class Memory:
    """The steps of one execution. Made once per run of the handler."""

    def __init__(self, steps: Sequence[Step] = (), run: int = 0, *, strict: bool = True) -> None:
        self._uses: Counter[tuple[StepKind, str]] = Counter()
        self._known: dict[tuple[StepKind, str, int], Step] = {}
        self.outcomes: dict[str, Any] = {}  # of children and flows that ended in this run, by the name of the step
        self.unanswered: set[tuple[str, int]] = set()  # waits that ended without a signal in this run, by name and use
        self._reset: set[tuple[StepKind, str, int]] = set()  # waits that a replay made start again
        for step in steps:
            if step.kind == "wait" and step.error is not None:
                self._reset.add((step.kind, step.name, step.n))
            elif step.error is None or step.run == run:
                self._known[step.kind, step.name, step.n] = step
        # The places of recorded ends that this run has not asked for yet, in their order.
        places = (step.place for step in self._known.values() if step.place is not None)
        self._unasked = deque(sorted(places))
        self._asked: set[int] = set()  # those asked for before an earlier one was
        self._last = max((step.place for step in steps if step.place is not None), default=0)
        self._passed = 0
        self._own_names: set[tuple[StepKind, str]] = set()
        self._old_names: set[tuple[StepKind, str]] = set()
        self.has_branched = not strict or ("patch", BRANCHED, 0) in self._known
        # Recorded effects that this run has not asked for: by kind, name and use, in the order they were recorded.
        self.missing: dict[tuple[StepKind, str, int], None] = {}
        if not self.has_branched and not _branched_after_failure(steps, run):
            self.missing = {
                key: None
                for key, step in self._known.items()
                if key[0] in _EFFECTS and step.outcome != "given_up" and not step.is_stray
            }

    def next(self, name: str, kind: StepKind, was: str | None = None) -> Request:
        """Return the next use of the name, with its recorded step; `was` is a name under which it may be recorded."""
        self._own_names.add((kind, name))
        if was is not None:
            self._old_names.add((kind, was))
        if self._old_names:
            self._check_names(kind, name, was)
        use = self._uses[kind, name]
        known = self._known.get((kind, name, use))
        if known is None and was is not None:
            earlier = self._uses[kind, was]
            known = self._known.get((kind, was, earlier))
            if known is not None:
                name, use = was, earlier
        self._uses[kind, name] = use + 1
        if self.missing:
            self.missing.pop((kind, name, use), None)
        return Request(kind, name, use, known)

    def _check_names(self, kind: StepKind, name: str, was: str | None) -> None:
        """Refuse an old name that is the name of another step: which of the two was recorded would be unclear."""
        for old in (was, name):
            if (kind, old) in self._old_names and (kind, old) in self._own_names:
                raise InvalidInput(
                    f"{old!r} is also the name of another step of this handler",
                    field="was",
                    allowed="a name that the handler no longer uses",
                )

    @property
    def first_unasked(self) -> int | None:
        """The place of the first recorded end that this run has not asked for."""
        return self._unasked[0] if self._unasked else None

    def asked(self, place: int) -> None:
        """This run asks for the end with this place."""
        self._asked.add(place)
        self._forget(0)

    def passed(self, place: int) -> None:
        """The handler gets the end with this place; it will not ask for those before."""
        self._passed = max(self._passed, place)
        self._forget(place)

    def _forget(self, before: int) -> None:
        while self._unasked and (self._unasked[0] < before or self._unasked[0] in self._asked):
            self._asked.discard(self._unasked.popleft())

    def draw(self) -> int:
        """Return the place of a new end."""
        self._last += 1
        return self._last

    def is_new(self, request: Request) -> bool:
        """Whether no run asked for it before, as far as is recorded."""
        return request.known is None and request[:3] not in self._reset

    def known(self, name: str, kind: StepKind, use: int) -> Step | None:
        """Return the recorded step of an earlier use of the name."""
        return self._known.get((kind, name, use))

    def earlier(self, name: str, kind: StepKind, use: int) -> Step | None:
        """Return the first earlier use of the name that succeeded and that the handler got."""
        found = (self._known.get((kind, name, before)) for before in range(use))
        return next((one for one in found if one and one.error is None and (one.place or 0) <= self._passed), None)

    def successes(self, kind: StepKind) -> list[Step]:
        """Return the recorded steps of a kind that succeeded."""
        return [step for step in self._known.values() if step.kind == kind and step.error is None]


def describe(kind: StepKind, name: str, use: int) -> str:
    """Return a recorded or requested thing in words."""
    what = name if kind == "submit" else f"{kind} {name!r}"
    return what if use == 0 else f"{what} (use {use + 1})"


def _branched_after_failure(steps: Sequence[Step], run: int) -> bool:
    """Whether an earlier run may have taken another branch: it recorded a failure, and other things after that.

    The success that later replaced such a failure is marked `retried`. If a replay made a wait start again, the steps
    after it are marked `is_stray`.
    """
    failed = False
    for step in steps:
        if failed or step.outcome == "retried":
            return True
        failed = step.error is not None and step.run != run and step.kind != "wait"
    return False


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
