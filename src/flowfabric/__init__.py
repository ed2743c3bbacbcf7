"""Durable execution for Python on plain Postgres."""

from flowfabric._duties import Duties
from flowfabric.app.app import App
from flowfabric.app.flow_builder import Flow, Join, Node, SubFlow, all_of, any_of, quorum
from flowfabric.app.task import Task
from flowfabric.client import AsyncClient, Client, FlowRun, Run, Submission, SyncFlowRun, SyncRun
from flowfabric.contexts import Context, SyncContext, SyncWaitpoint, Waitpoint
from flowfabric.contracts.codecs import Codec
from flowfabric.contracts.signature import Data, provided
from flowfabric.engine import Engine
from flowfabric.errors import (
    Bug,
    Conflict,
    ConnectionFailed,
    Contention,
    Corruption,
    ExecutionNotActive,
    FlowFabricError,
    FlowFailed,
    Interrupted,
    InvalidInput,
    LeaseLost,
    NoSignal,
    NotFound,
    Purged,
    Reject,
    ResourceExhausted,
    RetriesExhausted,
    RetryLater,
    StateError,
    StepFailed,
    StepsChanged,
    StreamBackpressure,
    StreamDisconnected,
    TaskFailed,
    TimedOut,
    TransportError,
    Unavailable,
    ValidationFailed,
)
from flowfabric.values.attempt import Completion, Failure
from flowfabric.values.callback import callback_text, parse_callback
from flowfabric.values.conditions import OperatorOnly, TimeoutOnly, count_signals, from_sources, on
from flowfabric.values.event import EventCursor
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.failure import FailureClass
from flowfabric.values.flow import FlowGraph
from flowfabric.values.ids import ExecutionId
from flowfabric.values.lane import LaneState
from flowfabric.values.lease import Fence, Handle, Operator
from flowfabric.values.options import Options
from flowfabric.values.page import ScannerFilter
from flowfabric.values.policies import (
    ExecutionPolicy,
    Exponential,
    Fixed,
    RetryPolicy,
    RoutingRequirements,
    StreamPolicy,
    TimeoutPolicy,
)
from flowfabric.values.signal import Accepted, DuplicateSignal, Signal
from flowfabric.values.state import State
from flowfabric.values.wait import WaitpointToken
from flowfabric.worker import Worker

__version__ = "0.1.0.dev0"

__all__ = [
    "Accepted",
    "App",
    "AsyncClient",
    "Bug",
    "Client",
    "Codec",
    "Completion",
    "Conflict",
    "ConnectionFailed",
    "Contention",
    "Context",
    "Corruption",
    "Created",
    "Data",
    "Duplicate",
    "DuplicateSignal",
    "Duties",
    "Engine",
    "EventCursor",
    "ExecutionId",
    "ExecutionNotActive",
    "ExecutionPolicy",
    "Exponential",
    "Failure",
    "FailureClass",
    "Fence",
    "Fixed",
    "Flow",
    "FlowFabricError",
    "FlowFailed",
    "FlowGraph",
    "FlowRun",
    "Handle",
    "Interrupted",
    "InvalidInput",
    "Join",
    "LaneState",
    "LeaseLost",
    "NewExecution",
    "NoSignal",
    "Node",
    "NotFound",
    "Operator",
    "OperatorOnly",
    "Options",
    "Purged",
    "Reject",
    "ResourceExhausted",
    "RetriesExhausted",
    "RetryLater",
    "RetryPolicy",
    "RoutingRequirements",
    "Run",
    "ScannerFilter",
    "Signal",
    "State",
    "StateError",
    "StepFailed",
    "StepsChanged",
    "StreamBackpressure",
    "StreamDisconnected",
    "StreamPolicy",
    "SubFlow",
    "Submission",
    "SyncContext",
    "SyncFlowRun",
    "SyncRun",
    "SyncWaitpoint",
    "Task",
    "TaskFailed",
    "TimedOut",
    "TimeoutOnly",
    "TimeoutPolicy",
    "TransportError",
    "Unavailable",
    "ValidationFailed",
    "Waitpoint",
    "WaitpointToken",
    "Worker",
    "all_of",
    "any_of",
    "callback_text",
    "count_signals",
    "from_sources",
    "on",
    "parse_callback",
    "provided",
    "quorum",
]
