"""What the benchmarks use of flowfabric beyond its public names, gathered in one place."""

from flowfabric._postgres import embedded
from flowfabric.engine.service import migrate_database
from flowfabric.graph import FlowCancelled, NewEdge, NewNode
from flowfabric.ids import crc16, mint_uuid
from flowfabric.models import Fresh, NewWaitpoint, Suspended, UsePending

__all__ = [
    "FlowCancelled",
    "Fresh",
    "NewEdge",
    "NewNode",
    "NewWaitpoint",
    "Suspended",
    "UsePending",
    "crc16",
    "embedded",
    "migrate_database",
    "mint_uuid",
]
