"""The object to which duties report while they run: metrics, for example."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from flowfabric.engine.timers import Round


class Watcher(Protocol):
    """Learns of every round of every duty, and of what this process leads."""

    async def round(self, name: str, proceed: Callable[[], Awaitable[Round]]) -> Round:
        """Runs around one round of a duty."""

    def leads(self, group: str, is_ours: bool) -> None:
        """This process began or ceased to lead a group of duties."""
