"""How long a text a regular expression may search without taking long.

Python's expressions backtrack: with nested repetitions the time grows exponentially with the text, with several
repetitions as a power of its length.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

try:
    from re import _constants as words  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # pragma: no cover - another Python keeps its parser elsewhere; then no pattern is searched
    parser = words = None

_STEPS: Final = 1_000_000
_MAX_PATTERN: Final = 1_000
_MAX_TEXT: Final = 65_536


@lru_cache(maxsize=256)
def longest_text(pattern: str) -> int:
    """Return how many characters `re.search` may be given for this pattern; 0 if it must not be searched at all."""
    if parser is None or len(pattern) > _MAX_PATTERN:
        return 0
    try:
        repetitions = _repetitions(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError):
        return 0
    if repetitions is None:
        return 0
    # Every position may begin a match, and every repetition may end at every position.
    return min(int(_STEPS ** (1 / (repetitions + 1))), _MAX_TEXT)


def _repetitions(parsed: Any) -> int | None:
    """Return how many repetitions of variable length a pattern has; None if one is inside another."""
    found = 0
    for word, value in parsed:
        inner: list[Any]
        if word in (words.MAX_REPEAT, words.MIN_REPEAT, getattr(words, "POSSESSIVE_REPEAT", None)):
            least, most, body = value
            inside = _repetitions(body)
            if inside is None or (most > 1 and (inside or _branches(body))):
                return None
            found += inside + (least != most)
            if most not in (words.MAXREPEAT, 1) and most > _MAX_PATTERN:
                return None
            continue
        if word is words.SUBPATTERN:
            inner = [value[-1]]
        elif word is words.BRANCH:
            inner = list(value[1])
        elif word is getattr(words, "ATOMIC_GROUP", None):
            inner = [value]
        elif word in (words.LITERAL, words.NOT_LITERAL, words.ANY, words.IN, words.AT, words.RANGE, words.CATEGORY):
            inner = []
        else:  # references to groups, conditions, looking around
            return None
        for each in inner:
            inside = _repetitions(each)
            if inside is None:
                return None
            found += inside
    return found


def _branches(parsed: Any) -> bool:
    """Whether a pattern can match in several ways without a repetition."""
    for word, value in parsed:
        if word is words.BRANCH:
            return True
        if word is words.SUBPATTERN and _branches(value[-1]):
            return True
        if word is getattr(words, "ATOMIC_GROUP", None) and _branches(value):
            return True
        if word in (words.MAX_REPEAT, words.MIN_REPEAT) and _branches(value[2]):
            return True
    return False
