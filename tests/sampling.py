"""How much of a large product or of many seeds a run plays: a fixed sample by default, all of it with `--full`."""

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


def seeds(count: int) -> range:
    """The first seed, or all of them."""
    return range(count if _is_full else 1)


def examples(count: int, of_a_sample: int = 20) -> int:
    """How many random histories are played."""
    return count if _is_full else min(count, of_a_sample)


def sample(items: Sequence[Item], count: int, *, seed: int = 1) -> list[Item]:
    """The same `count` items in every run, in their order, or all of them."""
    if _is_full or count >= len(items):
        return list(items)
    chosen = sorted(random.Random(seed).sample(range(len(items)), count))
    return [items[place] for place in chosen]
