"""Background duties: one file per duty, with the name of the duty everywhere: `lease_expiry.py`, `LeaseExpiry`.

Any number of processes may run them at the same time. `Duties` runs all of them.
"""

from __future__ import annotations

from flowfabric._duties.all import ALL
from flowfabric._duties.attempt_timeout import AttemptTimeout
from flowfabric._duties.audit import Audit
from flowfabric._duties.budget_reconciler import BudgetReconciler
from flowfabric._duties.budget_reset import BudgetReset
from flowfabric._duties.bulk_work import BulkWork
from flowfabric._duties.cascade import Cascade
from flowfabric._duties.child_cancel import ChildCancel
from flowfabric._duties.delayed_promotion import DelayedPromotion
from flowfabric._duties.duty import Duty
from flowfabric._duties.edge_repair import EdgeRepair
from flowfabric._duties.execution_deadline import ExecutionDeadline
from flowfabric._duties.flow_cancel import FlowCancel
from flowfabric._duties.flow_summaries import FlowSummaries
from flowfabric._duties.hook_submission import HookSubmission
from flowfabric._duties.lease_expiry import LeaseExpiry
from flowfabric._duties.limit_opening import LimitOpening
from flowfabric._duties.parked_promotion import ParkedPromotion
from flowfabric._duties.quota_reconciler import QuotaReconciler
from flowfabric._duties.record_expiry import RecordExpiry
from flowfabric._duties.registry_event_trimmer import RegistryEventTrimmer
from flowfabric._duties.reservation_end import ReservationEnd
from flowfabric._duties.retention import Retention
from flowfabric._duties.runner import Duties, TimerRunner
from flowfabric._duties.sibling_cancel import SiblingCancel
from flowfabric._duties.sibling_repair import SiblingRepair
from flowfabric._duties.suspension_timeout import SuspensionTimeout
from flowfabric._duties.timer import TimerDuty
from flowfabric._duties.unblock import Unblock
from flowfabric._duties.waitpoint_expiry import WaitpointExpiry
from flowfabric._duties.watcher import Watcher
from flowfabric._duties.worker_registry_ttl_sweep import WorkerRegistryTtlSweep

__all__ = [
    "ALL",
    "AttemptTimeout",
    "Audit",
    "BudgetReconciler",
    "BudgetReset",
    "BulkWork",
    "Cascade",
    "ChildCancel",
    "DelayedPromotion",
    "Duties",
    "Duty",
    "EdgeRepair",
    "ExecutionDeadline",
    "FlowCancel",
    "FlowSummaries",
    "HookSubmission",
    "LeaseExpiry",
    "LimitOpening",
    "ParkedPromotion",
    "QuotaReconciler",
    "RecordExpiry",
    "RegistryEventTrimmer",
    "ReservationEnd",
    "Retention",
    "SiblingCancel",
    "SiblingRepair",
    "SuspensionTimeout",
    "TimerDuty",
    "TimerRunner",
    "Unblock",
    "WaitpointExpiry",
    "Watcher",
    "WorkerRegistryTtlSweep",
]
