"""A worker starts an embedded server again that died or was asked to stop. Of several workers one does."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from flowfabric._waiting import first_of
from flowfabric.engine.service import revive_embedded
from flowfabric.errors import FlowFabricError

log = logging.getLogger("flowfabric.worker")
_POLL = 1.0  # seconds between two polls, each of which asks the kernel for a lock
_AFTER_FAILURE = 30.0
_PROBLEMS = {"died": "had died", "shutting_down": "was shutting down and waited for its clients"}


async def keep_alive(place: Path, stopping: asyncio.Event) -> None:
    """Look after the embedded server until `stopping`."""
    while not stopping.is_set():
        pause = _POLL
        try:
            if problem := await revive_embedded(place):
                log.warning("the embedded server in %s %s; this worker started it again", place, _PROBLEMS[problem])
        except FlowFabricError as error:
            log.warning("the embedded server in %s has stopped and cannot be started: %s", place, error)
            pause = _AFTER_FAILURE
        await first_of(pause, stopping)
