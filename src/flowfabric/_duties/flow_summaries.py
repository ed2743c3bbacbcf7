"""Flow summaries: count the members of flows that changed."""

from __future__ import annotations

from datetime import timedelta

from flowfabric._duties.duty import Duty


class FlowSummaries(Duty):
    """Counts the members of flows that changed."""

    interval = timedelta(seconds=15)

    async def run_once(self) -> int:
        counted = 0
        while True:
            batch, more = await self.engine.project_flow_summaries()
            counted += batch
            if not more or self.stopping.is_set():
                return counted
