"""What a test has asked for: crashes at steps, forced replays; and what was seen of steps meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.testing.errors import Nondeterministic, NotReached
from flowfabric.values.ids import ExecutionId

_ABOUT_ANOTHER = re.compile(r"((?:timeout of )?result(?: of flow)?) (?:\{fp:\d+\}:)?[0-9a-f-]{36}$")


class Point(NamedTuple):
    """A step as a crash is aimed at it. `n` counts the uses of its name in one execution, from 0."""

    task: str
    step: str
    n: int

    def __str__(self) -> str:
        return f"step {self.step!r} of {self.task}" + (f" (use {self.n})" if self.n else "")


class Crash:
    """One crash that was asked for. `happened` is how often it has come about."""

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


class End(Struct, frozen=True):
    """How a handler ended."""

    encoded: bytes | None = None
    raised: str | None = None

    def is_like(self, other: End) -> bool:
        if self == other:
            return True
        if self.raised is not None and other.raised is not None:
            # A remembered exception whose class cannot be made again is told in words.
            return "StepFailed" in (self.raised, other.raised)
        if self.encoded is None or other.encoded is None or self.raised or other.raised:
            return False
        # The order of keys is no difference.
        return bool(msgspec.json.decode(self.encoded) == msgspec.json.decode(other.encoded))

    def __str__(self) -> str:
        if self.raised is not None:
            return f"raised {self.raised}"
        shown = "None" if self.encoded is None else self.encoded.decode(errors="replace")
        return f"returned {shown if len(shown) <= 200 else shown[:200] + '...'}"


class Faults:
    """The plan of a kit, which its workers follow."""

    def __init__(self) -> None:
        self.crashes: list[Crash] = []
        self.replays = False
        self.recorded: list[tuple[ExecutionId, Point]] = []
        self.trouble: list[Nondeterministic] = []
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
                f" the steps that were done: {', '.join(map(repr, names)) or 'none'}"
            )

    @contextmanager
    def replaying(self) -> Iterator[None]:
        before, self.replays = self.replays, True
        try:
            yield
        finally:
            self.replays = before

    def point(self, execution_id: ExecutionId, task: str, name: str, n: int) -> Point:
        """The point of a step. What concerns another execution is recorded under its id, which no test can know."""
        found = _ABOUT_ANOTHER.match(name)
        if found is None:
            return Point(task, name, n)
        numbers = self._numbers.setdefault((execution_id, found[1]), {})
        return Point(task, found[1], numbers.setdefault((name, n), len(numbers)))

    def strikes(self, when: Literal["before", "after"], point: Point) -> bool:
        """Whether the worker dies here."""
        struck = [crash.strikes(when, point) for crash in self.crashes]  # every one of them counts
        return any(struck)
