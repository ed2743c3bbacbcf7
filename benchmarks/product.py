"""What the benchmarks use of flowfabric beyond its public names, gathered in one place."""

from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from flowfabric.engine.tails import Waiter
from flowfabric.values.budget import BudgetCreated, HardBreach, Report, Usage, UsageOk
from flowfabric.values.execution import NewExecution
from flowfabric.values.flow import FlowCancelled
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import mint_many, mint_uuid, partition_of_id
from flowfabric.values.policies import ExecutionPolicy
from flowfabric.values.quota import quota_policy_id_of
from flowfabric.values.wait import Fresh, NewWaitpoint, Suspended, UsePending

__all__ = [
    "BudgetCreated",
    "ExecutionPolicy",
    "FlowCancelled",
    "Fresh",
    "HardBreach",
    "NewEdge",
    "NewExecution",
    "NewNode",
    "NewWaitpoint",
    "Report",
    "Suspended",
    "Usage",
    "UsageOk",
    "UsePending",
    "Waiter",
    "embedded",
    "migrate_database",
    "mint_many",
    "mint_uuid",
    "partition_of_id",
    "quota_policy_id_of",
]
