"""Bulk work: run the bulk jobs that operators began over HTTP."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty, log
from flowfabric.errors import FlowFabricError, RetriesExhausted, TransportError


class BulkWork(Duty):
    """Cancels or replays what bulk jobs match, a chunk at a time; continues jobs whose process died."""

    interval = timedelta(seconds=1)

    async def run_once(self) -> int:
        handled = 0
        for job in await self.engine.list_running_bulk():
            while not self.stopping.is_set():
                try:
                    state, count = await self.engine.run_bulk(job.bulk_id)
                except (TransportError, RetriesExhausted):
                    raise
                except FlowFabricError as error:
                    log.error("bulk job %s cannot continue: %s", job.bulk_id, error)
                    await self.engine.stop_bulk(job.bulk_id, failure=str(error))
                    break
                handled += count
                if state != "running":
                    break
        return handled
