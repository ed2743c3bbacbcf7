"""Generate src/flowfabric/client/sync.py, the client for programs without an event loop, from the async client.

python scripts/sync_client.py           write it
python scripts/sync_client.py --check   exit with 1 if it is out of date
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias, TypeGuard

ROOT = Path(__file__).parent.parent
CLIENT = ROOT / "src/flowfabric/client"
TARGET = CLIENT / "sync.py"
SKIPPED = {"close", "send", "create"}
# The classes of the async client, base first.
PARTS = (
    ("base.py", "ClientBase"),
    ("submitting.py", "Submitting"),
    ("bulk.py", "BulkSubmitting"),
    ("budgets.py", "Budgeting"),
    ("signals.py", "Signalling"),
    ("client.py", "AsyncClient"),
)

HEAD = '''"""The client for programs without an event loop: every call runs on a loop in a background thread.

Generated from the async client by scripts/sync_client.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload
from uuid import UUID

from flowfabric.bridges.callbacks import Received
from flowfabric.client.client import AsyncClient, Filters
from flowfabric.client.connector import Connector, Graph
from flowfabric.client.flow_run import FlowRun, Named
from flowfabric.client.following import SyncStreamReader
from flowfabric.client.portal import Portal
from flowfabric.client.run import Run
from flowfabric.client.submission import Submittable, TypedTask
from flowfabric.engine.reads import Place
from flowfabric.values.attempt import Attempt
from flowfabric.values.budget import BudgetReset, BudgetStatus, ReportAnswer
from flowfabric.values.child import Child
from flowfabric.values.durations import Duration
from flowfabric.values.execution import Execution, ExecutionInfo, Outcome
from flowfabric.values.flow import (
    CancellationPolicy,
    CancellationScheduled,
    FlowCancelled,
    FlowGraph,
    FlowInfo,
    FlowSnapshot,
    FlowSummary,
    PartiallyCancelled,
)
from flowfabric.values.found import FoundId, What
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.lane import LaneState, LaneStats
from flowfabric.values.options import OptionNames
from flowfabric.values.page import Page
from flowfabric.values.quota import QuotaPolicy
from flowfabric.values.schedule import Schedule
from flowfabric.values.signal import Accepted, DuplicateSignal
from flowfabric.values.spending import FlowUsage, Mode, RunUsage
from flowfabric.values.state import State
from flowfabric.values.step import Step
from flowfabric.values.stream import Summary
from flowfabric.values.wait import PendingWaitpoint, Wait
from flowfabric.values.worker import WorkerRecord

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class SyncRun(Generic[R_co]):
    """One execution of a task, as the sync client returns it. Unpickled it is a `Run`, for `client.run(...)`."""

    __slots__ = ("_portal", "run")

    def __init__(self, portal: Portal, run: Run[R_co]) -> None:
        self._portal = portal
        self.run = run

    @property
    def execution_id(self) -> ExecutionId:
        return self.run.execution_id

    @property
    def id(self) -> str:
        """The execution's id, as plain text."""
        return self.run.id

    @property
    def kind(self) -> str | None:
        return self.run.kind

    @property
    def is_new(self) -> bool:
        return self.run.is_new

    def __repr__(self) -> str:
        return f"Sync{self.run!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyncRun) and other.run == self.run

    def __hash__(self) -> int:
        return hash(self.run)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.run.__reduce__()
'''

FLOW = '''

class SyncFlowRun:
    """One flow, as the sync client returns it. Unpickled it is a `FlowRun`, for `client.flow(...)`."""

    __slots__ = ("_portal", "run")

    def __init__(self, portal: Portal, run: FlowRun) -> None:
        self._portal = portal
        self.run = run

    @property
    def flow_id(self) -> FlowId:
        return self.run.flow_id

    @property
    def id(self) -> str:
        """The flow's id, as plain text."""
        return self.run.id

    @property
    def nodes(self) -> dict[str, ExecutionId]:
        """The executions by the names of their nodes."""
        return self.run.nodes

    @property
    def is_new(self) -> bool:
        return self.run.is_new

    @overload
    def __getitem__(self, node: str) -> SyncRun[Any]: ...
    @overload
    def __getitem__(self, node: Named[R]) -> SyncRun[R]: ...
    def __getitem__(self, node: str | Named[Any]) -> SyncRun[Any]:
        """A handle on one node, by name or by the node that `flow.add` returned."""
        return SyncRun(self._portal, self.run[node])

    def __repr__(self) -> str:
        return f"Sync{self.run!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SyncFlowRun) and other.run == self.run

    def __hash__(self) -> int:
        return hash(self.run)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.run.__reduce__()
'''

MIDDLE = '''

class Client:
    """Everything a program that is not a worker does: `with ff.Client(app) as client: ...`.

    Any number of threads may share one. An interrupted call is cancelled. After a fork, open another. It keeps a thread
    and connections until it is closed.
    """

    def __init__(self, app: Connector) -> None:
        self._portal = Portal()
        try:
            self._client: AsyncClient = self._portal.call(app.client())
        except BaseException:
            self._portal.close()
            raise

    def close(self) -> None:
        """Cancel running calls and close the connections. Closing again changes nothing."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, execution_id: str | ExecutionId | Run[Any] | SyncRun[Any], *, kind: str | None = None
    ) -> SyncRun[Any]:
        """A handle on an execution from its id (or from a handle of another process or client)."""
        known = execution_id.run if isinstance(execution_id, SyncRun) else execution_id
        return SyncRun(self._portal, self._client.run(known, kind=kind))

    def flow(self, flow_id: str | UUID | FlowRun | SyncFlowRun) -> SyncFlowRun:
        """A handle on a flow from its id (or from a handle of another process or client)."""
        known = flow_id.run if isinstance(flow_id, SyncFlowRun) else flow_id
        return SyncFlowRun(self._portal, self._client.flow(known))
'''


AnyFunction: TypeAlias = ast.AsyncFunctionDef | ast.FunctionDef


def methods(source: Path, name: str) -> list[AnyFunction]:
    tree = ast.parse(source.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        node for node in found.body if _is_call(node) and not node.name.startswith("_") and node.name not in SKIPPED
    ]


def _is_call(node: ast.stmt) -> TypeGuard[AnyFunction]:
    """Whether it is a coroutine function, or returns an async iterator."""
    if isinstance(node, ast.FunctionDef):
        returns = "" if node.returns is None else ast.unparse(node.returns)
        return returns == "StreamReader" or returns.startswith("AsyncIterator[")
    return isinstance(node, ast.AsyncFunctionDef)


def call_of(node: AnyFunction) -> str:
    args = node.args
    passed = [arg.arg for arg in args.posonlyargs + args.args if arg.arg != "self"]
    if args.vararg:
        passed.append(f"*{args.vararg.arg}")
    passed += [f"{arg.arg}={arg.arg}" for arg in args.kwonlyargs]
    if args.kwarg:
        passed.append(f"**{args.kwarg.arg}")
    return ", ".join(passed)


def written(node: AnyFunction, target: str) -> str:
    returns = ast.unparse(node.returns) if node.returns else "None"
    call = f"self._portal.call({target}.{node.name}({call_of(node)}))"
    shown = re.sub(r"\bRun\[", "SyncRun[", returns).replace("FlowRun", "SyncFlowRun")
    if returns.startswith("AsyncIterator["):
        body = f"return self._portal.iterate({target}.{node.name}({call_of(node)}))"
        shown = returns.removeprefix("Async")
    elif returns == "StreamReader":
        body = f"return SyncStreamReader(self._portal, {target}.{node.name}({call_of(node)}))"
        shown = "SyncStreamReader"
    elif returns.startswith("list[Run["):
        body = f"return [SyncRun(self._portal, run) for run in {call}]"
    elif returns.startswith("Run[") and returns.endswith("| None"):
        body = f"found = {call}\n        return None if found is None else SyncRun(self._portal, found)"
    elif returns.startswith("Run["):
        body = f"return SyncRun(self._portal, {call})"
    elif returns == "FlowRun":
        body = f"return SyncFlowRun(self._portal, {call})"
    else:
        body = call if returns == "None" else f"return {call}"
    head = f"    def {node.name}({ast.unparse(node.args)}) -> {shown}:"
    if any(ast.unparse(one) == "overload" for one in node.decorator_list):
        return f"\n    @overload\n{head} ...\n"
    doc = ast.get_docstring(node) or ""
    tail = "\n        " if "\n" in doc else ""
    doc = re.sub(r"\n(?=.)", "\n        ", doc)
    return f'\n{head}\n        """{doc}{tail}"""\n        {body}\n'


def text() -> str:
    parts = [HEAD]
    parts += [written(node, "self.run") for node in methods(CLIENT / "run.py", "Run")]
    parts.append(FLOW)
    parts += [written(node, "self.run") for node in methods(CLIENT / "flow_run.py", "FlowRun")]
    parts.append(MIDDLE)
    for file, name in PARTS:
        parts += [written(node, "self._client") for node in methods(CLIENT / file, name)]
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [str(ruff), "format", "--stdin-filename", str(TARGET), "-"],
        input="".join(parts),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def main() -> int:
    wanted = text()
    if "--check" in sys.argv:
        if TARGET.read_text() != wanted:
            print("src/flowfabric/client/sync.py is stale: run python scripts/sync_client.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
