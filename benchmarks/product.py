"""What the benchmarks use of flowfabric beyond its public names, gathered in one place."""

from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from flowfabric.engine.tails import Waiter
from flowfabric.values.flow import FlowCancelled
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import mint_many, mint_uuid, partition_of_id
from flowfabric.values.wait import Fresh, NewWaitpoint, Suspended, UsePending

__all__ = [
    "FlowCancelled",
    "Fresh",
    "NewEdge",
    "NewNode",
    "NewWaitpoint",
    "Suspended",
    "UsePending",
    "Waiter",
    "embedded",
    "migrate_database",
    "mint_many",
    "mint_uuid",
    "partition_of_id",
]
