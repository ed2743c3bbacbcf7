"""Random choices that hypothesis makes: a step of a history is its name and the numbers that decide the rest of it.

Both shrink: hypothesis leaves out steps, and numbers become 0, the first of each choice. Steps that are `nothing` are
what is left of a history whose length is fixed. A test that fails prints the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from hypothesis import note
from hypothesis import strategies as st

T = TypeVar("T")
Step: TypeAlias = tuple[str, list[int]]
NOTHING = "nothing"
_SIDES = 1000


class Dice:
    """Choices by the numbers of a step; those that it does not have are 0."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def throw(self, numbers: list[int]) -> None:
        """Begin a step."""
        self._numbers = numbers[::-1]

    def randrange(self, stop: int) -> int:
        return (self._numbers.pop() if self._numbers else 0) % stop

    def randint(self, first: int, last: int) -> int:
        return first + self.randrange(last - first + 1)

    def random(self) -> float:
        return self.randrange(_SIDES) / _SIDES

    def choice(self, items: Sequence[T]) -> T:
        return items[self.randrange(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        left = list(items)
        return [left.pop(self.randrange(len(left))) for _ in range(count)]


def histories(names: Sequence[str], length: int) -> st.SearchStrategy[list[Step]]:
    """Histories of `length` steps, or of up to half as many less; a name that occurs twice is chosen more often."""
    numbers = st.lists(st.integers(0, _SIDES - 1), max_size=8)
    step = st.tuples(st.sampled_from([NOTHING, *names]), numbers)
    return st.lists(step, min_size=length // 2, max_size=length).map(_told)


def _told(steps: list[Step]) -> list[Step]:
    note(f"steps = {[step for step in steps if step[0] != NOTHING]}")  # printed with the history that fails
    return steps
