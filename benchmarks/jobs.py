"""What the measured jobs are made of."""

from __future__ import annotations

import os
import time
from uuid import UUID

STEPS = ("first", "second", "third", "fourth", "fifth")
TOKENS = 100


def payload(size: int) -> bytes:
    """Random, so that nothing on the way can compress it."""
    return os.urandom(size)


def uuid7() -> UUID:
    """Time-ordered, like the ids of our executions: neighbours in time are neighbours in the index."""
    tail = int.from_bytes(os.urandom(10), "big") & ~(0xF << 76) & ~(0x3 << 62)
    return UUID(int=time.time_ns() // 1_000_000 << 80 | 0x7 << 76 | 0x2 << 62 | tail)
