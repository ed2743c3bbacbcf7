"""How much processor time others had while something was measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")
# user, nice, system, idle, iowait, irq, softirq, steal: the guest figures after them are part of user.
_STEAL = 7


class Stolen:
    """A context that knows, at its end, the stolen part of all processor time since its beginning.

    Zero where the system does not tell.
    """

    share: float = 0.0

    def __enter__(self) -> Self:
        self._before = _read()
        return self

    def __exit__(self, *exc_info: object) -> None:
        spent = [after - before for before, after in zip(self._before, _read(), strict=True)]
        total = sum(spent)
        self.share = spent[_STEAL] / total if total else 0.0


def _read() -> list[int]:
    try:
        first = _STAT.read_text().split("\n", 1)[0].split()
    except OSError:
        return [0] * (_STEAL + 1)
    return [int(ticks) for ticks in first[1 : _STEAL + 2]]


def load() -> str:
    """Whether others on this machine are at work: that slows everything down and is not counted as stolen."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
