"""The engine: every operation as one method, one SQL function, one round trip.

Operations are grouped by module; `Engine` is all of them. Results are frozen records, refusals are exceptions of one
tree. Nothing here decides what happens to rows: the functions in the database do.
"""

from __future__ import annotations

from flowfabric.engine.control import Control
from flowfabric.engine.events import Events
from flowfabric.engine.flow_control import FlowControl
from flowfabric.engine.flow_reads import FlowReads
from flowfabric.engine.flows import Flows
from flowfabric.engine.grants import Grants
from flowfabric.engine.hooks import Hooks
from flowfabric.engine.lanes import Lanes
from flowfabric.engine.lifecycle import Lifecycle
from flowfabric.engine.reads import Reads
from flowfabric.engine.schedules import Schedules
from flowfabric.engine.service import Service
from flowfabric.engine.steps import Steps
from flowfabric.engine.suspension import Suspensions
from flowfabric.engine.tokens import Tokens

__all__ = ["Engine"]


class Engine(
    Lifecycle, Steps, Suspensions, Tokens, Flows, FlowReads, FlowControl, Grants, Control, Reads, Lanes, Schedules,
    Events, Hooks, Service,
):  # fmt: skip
    """A connection to one deployment. `await Engine.connect()`, then `await engine.close()` or `async with`."""
