"""Writes src/flowfabric/app/sync_context.py: the context of synchronous handlers, from that of async ones.

python scripts/sync_context.py           write it
python scripts/sync_context.py --check   exit 1 if it is out of date

Every `await` becomes a call of `in_thread`. Parts that only synchronous handlers have are text below.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/flowfabric/app/context.py"
TARGET = ROOT / "src/flowfabric/app/sync_context.py"
NAMES = {"Waitpoint": "SyncWaitpoint", "StepWith": "SyncStepWith", "Spend": "SyncSpend"}
METHODS = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
# Docstrings of async methods that are wrong for the synchronous ones.
DOCS = {
    "step": """Run a function once, in this thread, and store its result.

        It is identified by this name and the number of its uses in this run. A finished step never runs again; a step
        that a crash interrupted does. An exception is kept, and raised again when the handler re-runs, until the task
        is retried. `step_with` gives a step its own retries. A step, a sleep or a submission inside the
        function is part of it and not recorded separately. `was` is an earlier name of the step: executions that
        recorded it under that name continue.
        """,
    "sleep": "Wait durably: the thread is free meanwhile. The time counts from the first call, also after a restart.",
    "submit": "Submit another task, only once even if this handler is re-run.",
}

HEAD = '''"""The context of a synchronous handler: facts about its execution, and durable operations.

Generated from context.py by scripts/sync_context.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from flowfabric.app.context import Facts, SpendFacts, WaitpointFacts
from flowfabric.app.flow_builder import Flow
from flowfabric.client.current import Scope
from flowfabric.client.submission import new_submission
from flowfabric.contracts.waits import RAISE, OnTimeout, Raise, Reason, WaitRequest
from flowfabric.values.budget import OnLost
from flowfabric.values.conditions import AllMet, Condition, Count, OperatorOnly, Single, TimeoutOnly
from flowfabric.values.durations import Duration
from flowfabric.values.ids import ExecutionId
from flowfabric.values.options import Options
from flowfabric.values.policies import RetryPolicy
from flowfabric.values.signal import Signal
from flowfabric.values.spending import Used, amounts_of
from flowfabric.values.stream import DurabilityMode, FrameKind

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from flowfabric.client.flow_run import FlowRun
    from flowfabric.client.run import Run
    from flowfabric.client.submission import TypedTask

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
U = TypeVar("U")
D = TypeVar("D")


class SyncContext(Facts):
    """The worker passes it to a synchronous handler with a parameter of this type. Use it only in the handler's thread.

    When the handler has to wait without a worker, or to stop, `Interrupted` unwinds it. It is not an `Exception`; do
    not catch it.
    """

    __slots__ = ()
'''


# Methods that only synchronous handlers have, after the similar one.
AFTER = {
    "step": '''
    def step_with(self, *, retry: RetryPolicy | None = None, was: str | None = None) -> SyncStepWith:
        """Steps that are retried in place; `was` is an earlier name of the step, as for `step`."""
        Options(retry=retry).checked()
        return SyncStepWith(self._scope, retry, was)
''',
    "usage": '''
    def spend(
        self,
        amounts: Mapping[str, int] | None = None,
        /,
        *,
        budgets: Collection[str] | None = None,
        on_lost: OnLost = "charge",
        name: str = "spend",
        **dimensions: int,
    ) -> SyncSpend:
        """Hold amounts before they are used: `with ctx.spend(tokens=8_000) as spend:`, then `spend.settle(...)`.

        As `Context.spend`.
        """
        return SyncSpend(self._scope, amounts_of(amounts, dimensions, "spend"), budgets, on_lost, name)
''',
    "submit": '''
    def submit_flow(self, flow: Flow) -> ChildFlow:
        """Submit a flow, or the nodes added to this one's, only once even if this handler is re-run."""
        return ChildFlow(self._scope, self._scope.in_thread(self._scope.client.submit_flow(flow)))
''',
}

WAITPOINT = '''

class SyncWaitpoint(WaitpointFacts, Generic[T]):
    """A waitpoint that accepts signals, and the token that they need."""

    __slots__ = ()
'''

SPEND = '''

class SyncSpend(SpendFacts):
    """Amounts that are held while a block runs: `ctx.spend`."""

    __slots__ = ()
'''

REST = '''

class SyncStepWith:
    """`ctx.step` with its own retries, or an earlier name."""

    __slots__ = ("_retry", "_scope", "_was")

    def __init__(self, scope: Scope, retry: RetryPolicy | None, was: str | None) -> None:
        self._scope = scope
        self._retry = retry
        self._was = was

    def __call__(self, name: str, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = self._scope.in_thread(self._scope.step(name, fn, args, kwargs, self._retry, None, self._was))
        return found


class Child(Generic[R]):
    """Another execution that a synchronous handler submitted."""

    __slots__ = ("_scope", "run")

    def __init__(self, scope: Scope, run: Run[R]) -> None:
        self._scope = scope
        self.run = run

    @property
    def execution_id(self) -> ExecutionId:
        return self.run.execution_id

    @property
    def id(self) -> str:
        return self.run.id

    def result(self) -> R:
        """Wait for its result without a worker; raises `TaskFailed` if it has none."""
        return self._scope.in_thread(self.run.result())


class ChildFlow:
    """A flow that a synchronous handler submitted."""

    __slots__ = ("_scope", "run")

    def __init__(self, scope: Scope, run: FlowRun) -> None:
        self._scope = scope
        self.run = run

    def result(self) -> dict[str, Any]:
        """Wait for the results of its nodes by name, without a worker; raises `FlowFailed` if one of them failed."""
        return self._scope.in_thread(self.run.result())
'''


class Synchronous(ast.NodeTransformer):
    """Rewrites a method to await nothing: a thread waits instead."""

    def visit_Await(self, node: ast.Await) -> ast.AST:
        in_thread = ast.parse("self._scope.in_thread", mode="eval").body
        return ast.Call(func=in_thread, args=[self.visit(node.value)], keywords=[])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(id=NAMES.get(node.id, node.id), ctx=node.ctx)


def methods(name: str) -> dict[str, list[ast.AsyncFunctionDef]]:
    """Return the async methods of a class, each with its overloads before it."""
    tree = ast.parse(SOURCE.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    by_name: dict[str, list[ast.AsyncFunctionDef]] = {}
    for node in found.body:
        if isinstance(node, ast.AsyncFunctionDef):
            by_name.setdefault(node.name, []).append(node)
    return by_name


def written(versions: list[ast.AsyncFunctionDef]) -> str:
    *overloads, node = versions
    # A synchronous handler calls no async function, so drop those overloads; a single remaining one is the signature.
    overloads = [one for one in overloads if "Awaitable" not in ast.unparse(one.args)]
    body = list(node.body)
    if len(overloads) == 1:
        (one,) = overloads
        node.args, node.returns = one.args, one.returns
        body[-1] = ast.parse(f"found: {ast.unparse(one.returns or ast.Constant(None))}").body[0]
        returned = node.body[-1]
        assert isinstance(body[-1], ast.AnnAssign)
        assert isinstance(returned, ast.Return)
        body[-1].value = returned.value
        body.append(ast.parse("return found").body[0])
        overloads = []
    if node.name in DOCS:
        body[0] = ast.Expr(ast.Constant(DOCS[node.name]))
    returns = ast.unparse(node.returns) if node.returns else "None"
    if returns.startswith("Run["):
        # The handle of a child waits in this thread.
        node.returns = ast.parse(f"Child[{returns[4:]}", mode="eval").body
        last = body[-1]
        assert isinstance(last, ast.Return)
        made = ast.parse("Child(self._scope)", mode="eval").body
        assert isinstance(made, ast.Call)
        assert last.value is not None
        made.args.append(last.value)
        body[-1] = ast.Return(made)
    node.body = body
    return "".join(f"\n{_indented(_sync(one))}\n" for one in (*overloads, node)) + AFTER.get(node.name, "")


def _sync(node: ast.AsyncFunctionDef) -> str:
    fields = {name: getattr(node, name) for name in node._fields}
    fields["name"] = METHODS.get(node.name, node.name)
    fields["decorator_list"] = [one for one in node.decorator_list if ast.unparse(one) != "awaited"]
    plain = Synchronous().visit(ast.FunctionDef(**fields))
    return ast.unparse(ast.fix_missing_locations(plain))


def _indented(text: str) -> str:
    """Indent for a class body; the lines of a docstring are already indented."""
    lines = text.split("\n")
    in_doc = False
    for place, line in enumerate(lines):
        if not in_doc:
            lines[place] = f"    {line}"
        if line.count('"""') == 1:
            in_doc = not in_doc
    return "\n".join(lines)


def text() -> str:
    parts = [HEAD, *map(written, methods("Context").values())]
    parts += [WAITPOINT, *map(written, methods("Waitpoint").values())]
    parts += [SPEND, *map(written, methods("Spend").values()), REST]
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
            print(f"{TARGET.relative_to(ROOT)} is stale: run python scripts/sync_context.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
