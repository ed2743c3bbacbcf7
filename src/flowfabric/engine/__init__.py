"""The engine: every operation as one method, one SQL function, one round trip.

A module of operations calls the functions of one chapter, a folder of `_postgres/sql/functions`; large chapters have
several modules. `Engine` combines them all.

    common       service
    keys         keys
    lanes        lanes
    workers      workers
    events       consumers, events, followers, subscriptions, watches
    leases       claims, leases
    grants       grants
    executions   executions, control, admission
    steps        steps
    streams      streams, tails
    limits       limits
    budgets      budgets, spending
    waits        waits, waitpoints, suspensions, signals
    flows        flows, flow_reads, flow_cancel, cascades, siblings, children, edges
    quotas       quotas
    schedules    schedules
    duties       timers
    reads        reads, vector
    server       acting, api_keys, bulk, failures, kept_answers, namespaces
    audit        audit

Results are frozen records, refusals are exceptions of one tree. The functions in the database decide what happens to
rows; nothing here does. `admission`, `grants`, `edges` and `vector` are for schedulers and for ports from FlowFabric in
Rust.
"""

from __future__ import annotations

from flowfabric.engine.acting import Acting
from flowfabric.engine.admission import Admission
from flowfabric.engine.api_keys import ApiKeys
from flowfabric.engine.audit import Audits
from flowfabric.engine.budgets import Budgets
from flowfabric.engine.bulk import Bulk
from flowfabric.engine.cascades import Cascades
from flowfabric.engine.children import Children
from flowfabric.engine.claims import Claims
from flowfabric.engine.consumers import Consumers
from flowfabric.engine.control import Control
from flowfabric.engine.edges import Edges
from flowfabric.engine.events import Events
from flowfabric.engine.executions import Executions
from flowfabric.engine.failures import FailureReads
from flowfabric.engine.flow_cancel import FlowCancels
from flowfabric.engine.flow_reads import FlowReads
from flowfabric.engine.flows import Flows
from flowfabric.engine.grants import Grants
from flowfabric.engine.kept_answers import KeptAnswers
from flowfabric.engine.keys import Keys
from flowfabric.engine.lanes import Lanes
from flowfabric.engine.leases import Leases
from flowfabric.engine.limits import LimitLookups
from flowfabric.engine.namespaces import Namespaces
from flowfabric.engine.quotas import Quotas
from flowfabric.engine.reads import Reads
from flowfabric.engine.schedules import Schedules
from flowfabric.engine.service import Service
from flowfabric.engine.siblings import Siblings
from flowfabric.engine.signals import Signals
from flowfabric.engine.spending import Spending
from flowfabric.engine.steps import Steps
from flowfabric.engine.streams import Streams
from flowfabric.engine.subscriptions import Subscriptions
from flowfabric.engine.suspensions import Suspensions
from flowfabric.engine.timers import Timers
from flowfabric.engine.vector import Vector
from flowfabric.engine.waitpoints import Waitpoints
from flowfabric.engine.waits import Waits
from flowfabric.engine.watches import Watches
from flowfabric.engine.workers import Workers

__all__ = ["Engine"]


class Engine(
    Executions, Grants, Claims, Leases, Control, Steps, Streams, Watches, Budgets, Spending,
    Waits, Waitpoints, Suspensions, Signals, Keys,
    Children, Flows, FlowReads, FlowCancels, Cascades, Siblings,
    Vector, Bulk, Reads, FailureReads, Lanes, Workers, Schedules, Consumers, Subscriptions, Events, Timers, Audits,
    Service, ApiKeys, KeptAnswers, Acting, Namespaces,
    Admission, Quotas, Edges, LimitLookups,
):  # fmt: skip
    """A connection to one deployment. `await Engine.connect()`, then `await engine.close()` or `async with`."""
