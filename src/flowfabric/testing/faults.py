"""The faults that a test requests, crashes at steps and forced replays, and the steps seen so far."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from flowfabric.errors import InvalidInput, StepsChanged
from flowfabric.testing.errors import Nondeterministic, NotReached
from flowfabric.values.ids import ExecutionId

R = TypeVar("R")
_ABOUT_ANOTHER = re.compile(r"((?:timeout of )?result(?: of flow)?) [0-9a-f-]{36}$")


class Point(NamedTuple):
    """A step at which a crash can happen. `n` counts the uses of its name in one execution, from 0."""

    task: str
    step: str
    n: int

    def __str__(self) -> str:
        return f"step {self.step!r} of {self.task}" + (f" (use {self.n})" if self.n else "")


class Crash:
    """A requested crash. `happened` counts how often it has happened."""

    def __init__(
        self, when: Literal["before", "after"], step: str, n: int | None, task: str | None, times: int
    ) -> None:
        self.when = when
        self.step = step
        self.n = n
        self.task = task
        self.times = times
        self.happened = 0

    def strikes(self, when: str, point: Point) -> bool:
        hit = (
            self.happened < self.times
            and when == self.when
            and point.step == self.step
            and self.n in (None, point.n)
            and self.task in (None, point.task)
        )
        self.happened += hit
        return hit

    def __str__(self) -> str:
        return f"a crash {self.when} step {self.step!r}" + ("" if self.n is None else f" (use {self.n})")


class Crashed(Struct, Generic[R], frozen=True):
    """A run with a crash: the step after which the worker crashed, and the result."""

    point: Point
    result: R


class CrashReport(Struct, Generic[R], frozen=True):
    """The report of `crash_everywhere`: the result without a crash, and one run per step with a crash."""

    result: R
    crashes: Sequence[Crashed[R]]

    @property
    def runs(self) -> int:
        """How often the task was run in total."""
        return 1 + len(self.crashes)


class End(Struct, frozen=True):
    """How a handler ended."""

    encoded: bytes | None = None
    raised: str | None = None

    def is_like(self, other: End) -> bool:
        if self == other:
            return True
        if self.raised is not None and other.raised is not None:
            # A recorded exception whose class cannot be rebuilt becomes a StepFailed.
            return "StepFailed" in (self.raised, other.raised)
        if self.encoded is None or other.encoded is None or self.raised or other.raised:
            return False
        # Ignore the order of keys.
        return bool(msgspec.json.decode(self.encoded) == msgspec.json.decode(other.encoded))

    def __str__(self) -> str:
        if self.raised is not None:
            return f"raised {self.raised}"
        shown = "None" if self.encoded is None else self.encoded.decode(errors="replace")
        return f"returned {shown if len(shown) <= 200 else shown[:200] + '...'}"


class Faults:
    """The requested faults of a kit, which its workers apply."""

    def __init__(self) -> None:
        self.crashes: list[Crash] = []
        self.replays = False
        self.recorded: list[tuple[ExecutionId, Point]] = []
        self.trouble: list[Nondeterministic | StepsChanged] = []
        self.first_ends: dict[tuple[ExecutionId, int], End] = {}  # by execution and run of it
        self._numbers: dict[tuple[ExecutionId, str], dict[tuple[str, int], int]] = {}

    @contextmanager
    def crash(
        self, when: Literal["before", "after"], step: str, *, n: int | None, task: str | None, times: int
    ) -> Iterator[Crash]:
        if not step or not isinstance(step, str):
            raise InvalidInput(f"got {step!r}", field="step", allowed="the name of a step")
        if type(times) is not int or times < 1:
            raise InvalidInput(f"got {times!r}", field="times", allowed="1 or more")
        crash = Crash(when, step, n, task, times)
        seen = len(self.recorded)
        self.crashes.append(crash)
        try:
            yield crash
        finally:
            self.crashes.remove(crash)
        if crash.happened < times:
            names = dict.fromkeys(point.step for _, point in self.recorded[seen:])
            raise NotReached(
                f"{crash} happened {crash.happened} of {times} times;"
                f" the recorded steps: {', '.join(map(repr, names)) or 'none'}"
            )

    @contextmanager
    def replaying(self) -> Iterator[None]:
        before, self.replays = self.replays, True
        try:
            yield
        finally:
            self.replays = before

    def point(self, execution_id: ExecutionId, task: str, name: str, n: int) -> Point:
        """The point of a step. The name of a step about another execution ends with its id, which no test knows."""
        found = _ABOUT_ANOTHER.match(name)
        if found is None:
            return Point(task, name, n)
        numbers = self._numbers.setdefault((execution_id, found[1]), {})
        return Point(task, found[1], numbers.setdefault((name, n), len(numbers)))

    def strikes(self, when: Literal["before", "after"], point: Point) -> bool:
        """Whether the worker crashes here."""
        struck = [
            crash.strikes(when, point) for crash in self.crashes
        ]  # not any(...) directly: each crash counts its hits
        return any(struck)
