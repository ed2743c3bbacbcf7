"""Durable execution for Python on plain Postgres.

These are the names that tasks, workers and clients need every day. Records, policies and the operations of the engine
are imported from their modules: `flowfabric.values`, `flowfabric.errors`, `flowfabric.engine`.
"""

from flowfabric._duties import Duties
from flowfabric.app.app import App
from flowfabric.app.context import Context
from flowfabric.app.flow_builder import Flow
from flowfabric.app.flow_nodes import Node, all_of, all_settled, any_of, quorum
from flowfabric.app.logs import EmitHandler
from flowfabric.app.sync_context import SyncContext
from flowfabric.app.task import Task
from flowfabric.client import AsyncClient, Client, FlowRun, Run
from flowfabric.client.consumer import Consumer
from flowfabric.contracts.codecs import BindingCodec, Codec
from flowfabric.contracts.signature import Data, provided
from flowfabric.engine import Engine
from flowfabric.errors import (
    BudgetExceeded,
    FlowFabricError,
    FlowFailed,
    Interrupted,
    InvalidInput,
    LeaseLost,
    NoSignal,
    NotFound,
    PayloadRefused,
    Reject,
    RetryLater,
    StepFailed,
    TaskFailed,
    TimedOut,
)
from flowfabric.values.binding import Bind
from flowfabric.values.callback import callback_text, parse_callback
from flowfabric.values.conditions import count_signals, from_sources, on
from flowfabric.values.hooks import Escalation, Failure
from flowfabric.values.ids import ExecutionId
from flowfabric.values.policies import Exponential, Fixed, RetryPolicy
from flowfabric.values.settled import Cancelled, Expired, Failed, Settled, Skipped, Succeeded
from flowfabric.values.signal import Signal
from flowfabric.values.spending import Budget, usd
from flowfabric.values.state import State
from flowfabric.values.stream import NULL_SENTINEL as NULL
from flowfabric.values.stream import Frame, Gap, KeepAlive, NewAttempt
from flowfabric.worker import Worker

__version__ = "0.1.0.dev0"

__all__ = [
    "NULL",
    "App",
    "AsyncClient",
    "Bind",
    "BindingCodec",
    "Budget",
    "BudgetExceeded",
    "Cancelled",
    "Client",
    "Codec",
    "Consumer",
    "Context",
    "Data",
    "Duties",
    "EmitHandler",
    "Engine",
    "Escalation",
    "ExecutionId",
    "Expired",
    "Exponential",
    "Failed",
    "Failure",
    "Fixed",
    "Flow",
    "FlowFabricError",
    "FlowFailed",
    "FlowRun",
    "Frame",
    "Gap",
    "Interrupted",
    "InvalidInput",
    "KeepAlive",
    "LeaseLost",
    "NewAttempt",
    "NoSignal",
    "Node",
    "NotFound",
    "PayloadRefused",
    "Reject",
    "RetryLater",
    "RetryPolicy",
    "Run",
    "Settled",
    "Signal",
    "Skipped",
    "State",
    "StepFailed",
    "Succeeded",
    "SyncContext",
    "Task",
    "TaskFailed",
    "TimedOut",
    "Worker",
    "all_of",
    "all_settled",
    "any_of",
    "callback_text",
    "count_signals",
    "from_sources",
    "on",
    "parse_callback",
    "provided",
    "quorum",
    "usd",
]
