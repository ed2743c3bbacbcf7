"""How much of a large product or of many seeds a run executes: a fixed sample by default, all of it with `--full`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")
_is_full = False


def configure(*, full: bool) -> None:
    global _is_full
    _is_full = full


def is_full() -> bool:
    """Whether this run plays everything."""
    return _is_full


def seeds(*given: Item) -> tuple[Item, ...]:
    """The first of these, or all."""
    return given if _is_full else given[:1]


def examples(count: int, of_a_sample: int = 20) -> int:
    """How many random histories are played."""
    return count if _is_full else min(count, of_a_sample)


def sample(items: Sequence[Item], count: int, *, seed: int = 1) -> list[Item]:
    """The same `count` items in every run, in their order, or all of them."""
    if _is_full or count >= len(items):
        return list(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), count))
    return [items[place] for place in chosen]


def pairs(items: Sequence[tuple[str, str, Item]], count: int, *, seed: int = 1) -> list[Item]:
    """As `sample`, of things between two names, so that each name is the first of one and the second of another."""
    if _is_full or count >= len(items):
        return [item for _, _, item in items]
    order = random.Random(seed).sample(range(len(items)), len(items))
    firsts: set[str] = set()
    seconds: set[str] = set()
    chosen = set()
    for place in order:
        first, second, _ = items[place]
        if first not in firsts or second not in seconds:
            chosen.add(place)
            firsts.add(first)
            seconds.add(second)
    chosen.update([place for place in order if place not in chosen][: max(0, count - len(chosen))])
    return [items[place][2] for place in sorted(chosen)]


def rotate(groups: Sequence[Sequence[Item]]) -> list[Item]:
    """Of each group one item, the first of the first group, the second of the second and so on; or all of them."""
    if _is_full:
        return [item for group in groups for item in group]
    return [group[number % len(group)] for number, group in enumerate(groups)]


def each_value(items: Sequence[tuple[Sequence[str], Item]]) -> list[Item]:
    """A few of a product, given with their coordinates, so that each coordinate occurs; or all of them."""
    if _is_full:
        return [item for _, item in items]
    left = {place for names, _ in items for place in enumerate(names)}
    chosen: set[int] = set()
    while left:
        best = max(range(len(items)), key=lambda number: (len(left & set(enumerate(items[number][0]))), -number))
        chosen.add(best)
        left -= set(enumerate(items[best][0]))
    return [items[number][1] for number in sorted(chosen)]
