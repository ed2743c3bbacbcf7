"""Writes the reference pages from the code; `cli_reference.py` writes the page of the command line.

    python scripts/reference.py           write docs/reference/
    python scripts/reference.py --check   change nothing; exit 1 and name the pages that differ

The text of a page comes from the docstrings. This script only arranges it, so that a page cannot contradict the code.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_overloads

import msgspec

import flowfabric as ff
from flowfabric import _duties, _taxonomy, bridges, drawing, errors, middleware, testing
from flowfabric._postgres import roles
from flowfabric.app import app, sync_context
from flowfabric.app.context import Spend, Waitpoint
from flowfabric.app.flow_nodes import Join, SubFlow
from flowfabric.app.sync_context import SyncWaitpoint
from flowfabric.bridges import asyncpg as bridge_asyncpg
from flowfabric.bridges import callbacks, sse
from flowfabric.bridges import django as bridge_django
from flowfabric.bridges import psycopg as bridge_psycopg
from flowfabric.bridges import sqlalchemy as bridge_sqlalchemy
from flowfabric.client import Submission, SyncFlowRun, SyncRun
from flowfabric.client.following import StreamReader, SyncStreamReader
from flowfabric.contracts import signature
from flowfabric.engine import (
    acting,
    audit,
    cascades,
    children,
    edges,
    flow_cancel,
    flow_reads,
    followers,
    reads,
    siblings,
    timers,
)
from flowfabric.values import (
    api_key,
    attempt,
    budget,
    bulk,
    callback,
    child,
    conditions,
    consumer,
    event,
    execution,
    failure,
    flow,
    found,
    grant,
    graph,
    held,
    hooks,
    ids,
    joins,
    kept_answer,
    keystore,
    lane,
    lease,
    operator_audit,
    page,
    policies,
    quota,
    schedule,
    settled,
    signal,
    spending,
    state,
    step,
    stream,
    vector,
    wait,
    words,
)
from flowfabric.values import worker as worker_values
from flowfabric.values.options import Options

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference"
WRITTEN_BY = "<!-- Written by scripts/reference.py from the docstrings. Edit those. -->"
WIDTH = 110


# The operations that most users of `Engine` need; all others follow, by chapter.
EVERYDAY = (
    "connect", "create_execution", "create_many", "claim", "claim_many", "renew_many", "complete_many", "fail",
    "cancel", "replay_execution", "read_execution", "find_executions", "read_outcomes", "signal_execution",
    "list_waits",
    "submit_flow", "describe_flow", "cancel_flow", "lane_stats", "read_events",
)  # fmt: skip


def engine_page() -> str:
    """Every public name of `Engine`, in the groups the code has."""
    lines = [
        "# Engine",
        "",
        WRITTEN_BY,
        "",
        "`flowfabric.Engine` has one method per operation; each is one SQL function and one round trip. Connect with"
        " `await Engine.connect()`, close with `await engine.close()` or use `async with`. A refusal is raised as one"
        " of the [errors](errors.md); calls for many items return one verdict per item instead, which is the exception"
        " for a refused item. Arguments and results are described in [records](records.md), the behaviour"
        " in [executions](../concepts/executions.md).",
        "",
    ]
    lines += [
        "## Everyday operations",
        "",
        "These twenty are enough to submit, run, inspect and control executions. The chapters below have everything;"
        " the last three (Admission, Grants, Edges) and Vector are for schedulers and ports from FlowFabric in Rust.",
        "",
        "| operation | what it does |",
        "|---|---|",
    ]
    for name in EVERYDAY:
        lines.append(f"| [`{name}`](#{name}) | {_line(getattr(ff.Engine, name).__doc__.partition(chr(10))[0])} |")
    lines.append("")
    for group in ff.Engine.__bases__:
        intro = _paragraphs(sys.modules[group.__module__].__doc__)
        lines += [f"## {group.__name__}", "", intro, ""]
        for name, member in vars(group).items():
            if not name.startswith("_"):
                lines += [f"### {name}", "", *_member(name, member), ""]
    lines += ["## Duties", "", *_class(_duties.Duties), ""]
    for name in ("stop",):
        lines += [f"### Duties.{name}", "", *_member(name, vars(_duties.Duties)[name]), ""]
    lines += ["The duties it runs by default:", ""]
    lines += ["| duty | at the latest every | what it does |", "|---|---|---|"]
    for duty in _duties.ALL:
        lines.append(f"| `{duty.name}` | {duty.interval.total_seconds():g} s | {_line(duty.__doc__)} |")
    return _page(lines)


def tasks_page() -> str:
    """The everyday API: apps, tasks, contexts of handlers, options, workers."""
    lines = [
        "# Tasks and workers",
        "",
        WRITTEN_BY,
        "",
        "How tasks behave is in [tasks](../concepts/tasks.md); how to write them in the guides, from"
        " [steps](../guides/steps.md) on.",
        "",
    ]
    for cls in (ff.App, ff.Task, app.ScheduleSpec, Options):
        lines += _documented(cls)
    lines += ["## In a handler", ""]
    lines += _documented(ff.Context, level=3, inherited=True)
    lines += [*_documented(ff.SyncContext, level=3), "It has the same facts about the execution as `Context`.", ""]
    lines += _documented(sync_context.Child, level=3)
    lines += ["## Hooks", "", _paragraphs(hooks.__doc__), ""]
    for cls in (ff.Failure, ff.Escalation):
        lines += _documented(cls, level=3, made_here=False)
    for raised in (errors.RetryLater, errors.Reject, errors.Interrupted):
        lines += [f"### {raised.__name__}", "", *_constructor(raised), _paragraphs(raised.__doc__), ""]
    lines += ["## Waiting for signals", "", "How to use them: [waiting for people](../guides/waiting.md).", ""]
    for cls in (Waitpoint, SyncWaitpoint):
        lines += _documented(cls, level=3, inherited=True, made_here=False)
    lines += _documented(ff.Signal, level=3)
    for condition in (ff.on, ff.all_of, ff.any_of, ff.from_sources, ff.count_signals):
        lines += _function(condition)
    lines += ["## Limits", "", "How to use them: [budgets and limits](../guides/budgets-and-limits.md).", ""]
    for cls in (ff.Budget, ff.Bind):
        lines += _documented(cls, level=3)
    for cls in (Spend, sync_context.SyncSpend):
        lines += _documented(cls, level=3, inherited=True, made_here=False)
    lines += _documented(spending.Used, level=3, made_here=False)
    lines += [*_function(ff.usd), "### BudgetExceeded", "", *_constructor(ff.BudgetExceeded)]
    lines += [_paragraphs(ff.BudgetExceeded.__doc__), ""]
    lines += ["## Output", "", "How to use it: [stream output](../guides/streaming.md).", ""]
    lines += _documented(ff.EmitHandler, level=3)
    lines += ["### NULL", "", _paragraphs(_words_after(stream, "NULL_SENTINEL")), ""]
    lines += ["## Stored and shared data", "", *_documented(ff.Codec, level=3), *_documented(ff.BindingCodec, level=3)]
    for name in ("Data", "provided"):
        lines += [f"### {name}", "", _paragraphs(_words_after(signature, name)), ""]
    return _page([*lines, *_documented(ff.Worker)])


def flows_page() -> str:
    """Flows as they are built, submitted and drawn."""
    lines = [
        "# Flows",
        "",
        WRITTEN_BY,
        "",
        "How to use them: [fan out and join](../guides/flows.md); how they behave: [flows](../concepts/flows.md)."
        " Create one with `app.flow(name)`, in a running task with `ctx.flow()`. `all_of` and `any_of` take nodes and"
        " [conditions of waits](tasks.md#waiting-for-signals).",
        "",
    ]
    for cls, without in (
        (ff.Flow, ("submissions", "ids", "build", "id_of")),  # for the client
        (ff.Node, ()),
        (Join, ()),
        (SubFlow, ()),
    ):
        lines += _documented(cls, made_here=False, without=without)
    lines += ["## Joins", ""]
    for join in (ff.all_of, ff.any_of, ff.quorum, ff.all_settled):
        lines += _function(join)
    lines += ["## Outcomes", "", _paragraphs(settled.__doc__), ""]
    lines += ["### Settled", "", _paragraphs(_words_after(settled, "Settled")), ""]
    for cls in (ff.Succeeded, ff.Failed, ff.Expired, ff.Cancelled, ff.Skipped):
        lines += _documented(cls, level=3, made_here=False)
    for cls in (ff.FlowRun, SyncFlowRun, sync_context.ChildFlow):
        lines += _documented(cls, made_here=False)
    lines += ["## Pictures", "", "`flowfabric.drawing`", "", _paragraphs(drawing.__doc__), ""]
    for draw in (drawing.to_text, drawing.plain, drawing.to_mermaid, drawing.to_dot, drawing.to_svg):
        lines += [f"### {draw.__name__}", "", *_member(draw.__name__, draw), ""]
    return _page(lines)


def clients_page() -> str:
    """Clients, for programs that are not workers."""
    lines = [
        "# Clients",
        "",
        WRITTEN_BY,
        "",
        "`await app.client()` returns an `AsyncClient`; `Client` is the same for programs without an event loop."
        " `task.submit(...)` uses one automatically.",
        "",
    ]
    for cls in (ff.AsyncClient, ff.Run, Submission, ff.Client, SyncRun):
        lines += _documented(cls, inherited=True)
    lines += ["## Events", "", "How to use them: [follow events](../guides/follow-events.md).", ""]
    for cls in (ff.Consumer, followers.Subscription):
        lines += _documented(cls, level=3)
    lines += ["## Callbacks", "", *_documented(callbacks.Received, level=3)]
    lines += [*_function(ff.callback_text), *_function(ff.parse_callback)]
    for cls in (StreamReader, SyncStreamReader):
        lines += _documented(cls, made_here=False)
    return _page(lines)


def bridges_page() -> str:
    """`flowfabric.bridges`: submitting through other drivers, server-sent events."""
    lines = [
        "# Bridges",
        "",
        WRITTEN_BY,
        "",
        _paragraphs(bridges.__doc__),
        "",
        "How to use them: [submit in your transaction](../guides/submit-in-your-transaction.md), [show output in a"
        " browser](../guides/streaming.md#show-it-in-a-browser).",
        "",
    ]
    lines += ["## Server-sent events", "", _paragraphs(sse.__doc__), ""]
    for function in (sse.events, sse.event, sse.end, sse.error_event):
        lines += _function(function, "flowfabric.bridges.sse")
    for module in (bridge_asyncpg, bridge_psycopg, bridge_sqlalchemy, bridge_django):
        library = module.__name__.rpartition(".")[2]
        lines += [f"## {library}", "", f"`{module.__name__}`", "", _paragraphs(module.__doc__), ""]
        for name in ("create_execution", "create_many", "create_execution_async", "create_many_async"):
            if hasattr(module, name):
                lines += [f"### {library}.{name}", "", *_member(name, getattr(module, name)), ""]
    return _page(lines)


def middleware_page() -> str:
    """`flowfabric.middleware`."""
    lines = ["# Middleware", "", WRITTEN_BY, "", _paragraphs(middleware.__doc__), ""]
    for name in middleware.__all__:
        value = getattr(middleware, name)
        if inspect.isclass(value):
            lines += _documented(value, own="flowfabric.middleware")
        elif inspect.isfunction(value):
            lines += [f"## {name}", "", *_member(name, value), ""]
    lines += ["## METRICS", "", "| name | kind | labels | what |", "|---|---|---|---|"]
    for name, metric in middleware.METRICS.items():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{name}` | {metric.type} | {labels} | {_line(metric.text)} |")
    return _page(lines)


def testing_page() -> str:
    """`flowfabric.testing`."""
    lines = ["# Testing kit", "", WRITTEN_BY, "", _paragraphs(testing.__doc__), ""]
    lines += ["How to use it: [test your tasks](../guides/testing.md).", ""]
    for name in testing.__all__:
        lines += _documented(getattr(testing, name), own="flowfabric.testing")
    return _page(lines)


def records_page() -> str:
    """Arguments, results, policies, words."""
    lines = [
        "# Records, policies and words",
        "",
        WRITTEN_BY,
        "",
        "An execution is named by an `ExecutionId` (`flowfabric.ExecutionId`), a flow by a `FlowId`. Both are UUIDs to"
        " Python and to the database; the names are for type checkers.",
        "",
        "Records are frozen. The module to import from is below each name; most are results that you never construct.",
        "",
    ]
    for title, modules in (
        ("Identifiers", [ids, found]),
        ("States", [state, vector]),
        ("Policies", [policies, failure]),
        ("Executions", [execution, attempt, child, lease, step, reads]),
        ("Streams", [stream]),
        ("Waits", [wait, signal, callback, keystore, conditions]),
        ("Flows", [flow, graph, joins, flow_reads, cascades, siblings, flow_cancel, children, edges]),
        ("Lanes, workers, schedules, events", [lane, worker_values, schedule, event, consumer, page, timers, audit]),
        ("Budgets and quotas", [budget, quota, held, spending]),
        ("Grants", [grant]),
        ("API keys, audit log, bulk jobs", [api_key, acting, operator_audit, bulk, kept_answer]),
        ("Words", [words]),
    ):
        lines += [f"## {title}", ""]
        for module in modules:
            for cls in _classes(module):
                if _is_interesting(cls):
                    lines += [f"### {cls.__name__}", "", *_class(cls), ""]
    return _page(lines)


def roles_page() -> str:
    """Every public function of the schema and the roles that may call it, from the headers of the functions."""
    lines = [
        "# Roles",
        "",
        "<!-- Written by scripts/reference.py from the headers of the SQL functions. Edit those. -->",
        "",
        "Which [role](../guides/roles.md) may call which function of the schema `flowfabric`. A method of the `Engine`"
        " calls the function of its name, or of the name in [parity](parity.md); a call by an operator, without a"
        " lease, is the function that ends with `_as_operator`.",
        "",
        "| function | read | submit | work | operate |",
        "|---|---|---|---|---|",
    ]
    for name, may in sorted(roles.callers().items()):
        marks = " | ".join("yes" if role in may else "" for role in roles.Role)
        lines.append(f"| `{name}`{'' if may else ' (the owner)'} | {marks} |")
    return _page(lines)


def errors_page() -> str:
    """The exception tree and the table of kinds."""
    tree, _, _ = (inspect.getdoc(errors) or "").partition("A family is one class")
    drawing = "\n".join(tree.splitlines()[1:]).strip("\n")
    lines = [
        "# Errors",
        "",
        WRITTEN_BY,
        "",
        "Everything flowfabric raises is a `FlowFabricError`. A family is one class, its `kind` says which case of it;"
        " a subclass exists only where a caller does something different.",
        "",
        "```text",
        inspect.cleandoc(drawing),
        "```",
        "",
        "## Classes",
        "",
    ]
    for cls in _classes(errors):
        if issubclass(cls, errors.FlowFabricError):
            lines += [f"### {cls.__name__}", "", _paragraphs(cls.__doc__), ""]
            if cls is errors.ConnectionFailed:
                lines += [f"* `{kind}`: {text}" for kind, text in errors.ConnectionFailed.WORDING.items()] + [""]
    lines += [
        "## Kinds",
        "",
        "*terminal*: do not repeat the call. *retryable*: repeat it later, or read again first. *informational*:"
        " nothing to do. *bug*: report it.",
        "",
        "| class | kind | meaning for the caller | HTTP status | code on the wire | `retryable` on the wire |",
        "|---|---|---|---|---|---|",
    ]
    for row in _taxonomy.TAXONOMY:
        lines.append(
            f"| {_raised_as(row.family, row.kind)} | `{row.kind}` | {row.error_class} | {row.http_status}"
            f" | `{row.code}` | {'yes' if row.wire_retryable else 'no'} |"
        )
    return _page(lines)


def _documented(
    cls: type,
    *,
    level: int = 2,
    own: str = "flowfabric",
    inherited: bool = False,
    made_here: bool = True,
    without: Collection[str] = (),
) -> list[str]:
    """A class with its public members, each under its own heading."""
    lines = [f"{'#' * level} {cls.__name__}", ""]
    lines += [f"`{own}.{cls.__name__}`" if own != "flowfabric" else _place(cls), ""]
    if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("):
        lines += [_paragraphs(cls.__doc__), ""]
    if issubclass(cls, msgspec.Struct):
        lines += [*_fields(cls), ""]
    elif made_here and not getattr(cls, "_is_protocol", False):
        lines += _constructor(cls)
    bases = [one for one in reversed(cls.__mro__) if one.__module__.startswith("flowfabric.")] if inherited else [cls]
    members = {name: member for base in bases for name, member in vars(base).items()}
    for name, member in members.items():
        is_member = isinstance(member, property | classmethod | staticmethod | FunctionType)
        if is_member and not name.startswith("_") and name not in without:
            lines += [f"{'#' * (level + 1)} {cls.__name__}.{name}", "", *_member(name, member), ""]
    return lines


def _function(function: Callable[..., Any], own: str = "flowfabric") -> list[str]:
    """A function that a module exports, in all forms it has."""
    name = function.__name__
    forms = [_signature(name, form) for form in get_overloads(function) or [function]]
    words = _paragraphs(inspect.getdoc(function))
    return [f"### {name}", "", f"`{own}.{name}`", "", "```text", *forms, "```", "", words, ""]


def _constructor(cls: type) -> list[str]:
    """How to construct an object of a class, if users do that."""
    init = vars(cls).get("__init__")
    if init is None:
        return []
    words = [] if not init.__doc__ else [_paragraphs(init.__doc__), ""]
    return ["```text", _signature(cls.__name__, init).removesuffix(" -> None"), "```", "", *words]


def _words_after(module: ModuleType, name: str) -> str:
    """The text below the assignment of a name."""
    body = ast.parse(inspect.getsource(module)).body
    for place, node in enumerate(body):
        targets = [getattr(node, "target", None), *getattr(node, "targets", ())]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            below = body[place + 1]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return str(below.value.value)
    raise LookupError(f"{module.__name__}.{name} has no docstring")


def _raised_as(family: str, kind: str) -> str:
    special = _taxonomy.SPECIAL.get((family, kind))
    return f"`{special or next(c.__name__ for c in _classes(errors) if getattr(c, 'family', None) == family)}`"


def _place(cls: type) -> str:
    """The module that a class is imported from."""
    return f"`{'flowfabric' if cls.__name__ in ff.__all__ else cls.__module__}.{cls.__name__}`"


def _classes(module: ModuleType) -> Iterator[type]:
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            is_alias = value.__name__ != name
            if not is_alias and not name.startswith("_"):
                yield value


def _is_interesting(cls: type) -> bool:
    return issubclass(cls, msgspec.Struct | Enum | str) or cls in (ids.PartitionKey, wait.WaitpointToken)


def _class(cls: type) -> list[str]:
    lines = []
    lines += [_place(cls), ""]
    if cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("):
        lines += [_paragraphs(cls.__doc__), ""]
    if issubclass(cls, Enum):
        lines += [" · ".join(f"`{member.value}`" for member in cls), ""]
    elif issubclass(cls, msgspec.Struct):
        lines += [*_fields(cls), ""]
    for name, member in vars(cls).items():
        words = member.__doc__ if isinstance(member, property | classmethod | FunctionType) else None
        if words and not name.startswith("_") and not issubclass(cls, Enum | _duties.Duties):
            lines.append(f"* `{name}`: {_line(words)}")
    return lines


def _fields(cls: type[msgspec.Struct]) -> list[str]:
    if not msgspec.structs.fields(cls):
        return []
    lines = ["| field | type | default |", "|---|---|---|"]
    types = {name: text for base in reversed(cls.__mro__) for name, text in inspect.get_annotations(base).items()}
    for field in msgspec.structs.fields(cls):
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
        shown = "" if default in (msgspec.NODEFAULT, msgspec.UNSET) else f"`{_value(default)}`"
        lines.append(f"| `{field.name}` | `{_cell(_type(types[field.name]))}` | {shown} |")
    return lines


def _type(annotation: object) -> str:
    return str(annotation).removesuffix(" | UnsetType")


def _member(name: str, member: Any) -> list[str]:
    words = _paragraphs(inspect.getdoc(member.__func__ if isinstance(member, staticmethod | classmethod) else member))
    if isinstance(member, property):
        return [f"*property* `{name}: {inspect.signature(member.fget).return_annotation}`", "", words]  # type: ignore[arg-type]
    function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
    return ["```text", _signature(name, function), "```", "", words]


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parts: list[str] = []
    is_starred = False
    given = list(signature.parameters.values())
    if given and given[0].name in ("self", "cls"):
        given = given[1:]
    for place, parameter in enumerate(given):
        if parameter.kind is parameter.KEYWORD_ONLY and not is_starred:
            is_starred = True
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        is_starred = is_starred or stars == "*"
        text = f"{stars}{parameter.name}: {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {_value(parameter.default)}"
        parts.append(text)
        following = given[place + 1].kind if place + 1 < len(given) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.POSITIONAL_ONLY:
            parts.append("/")
    answer = signature.return_annotation
    awaited = "await " if inspect.iscoroutinefunction(inspect.unwrap(function)) else ""
    line = f"{awaited}{name}({', '.join(parts)}) -> {answer}"
    if len(line) <= WIDTH:
        return line
    inner = "".join(f"    {part},\n" for part in parts)
    return f"{awaited}{name}(\n{inner}) -> {answer}"


def _value(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, msgspec.Struct) and value == type(value)():
        return f"{type(value).__name__}()"
    if value is Any:
        return "Any"
    if inspect.isclass(value):
        return f"{value.__name__}()"
    if inspect.isroutine(value):
        return "..." if value.__name__ == "<lambda>" else value.__name__
    if isinstance(value, tuple) and all(inspect.isclass(item) for item in value) and value:
        return "all"
    return repr(value).replace("datetime.timedelta", "timedelta")


def _paragraphs(text: str | None) -> str:
    """Docstring prose, one paragraph per line group, without the hard line breaks of the source."""
    blocks = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(line.strip() for line in block.splitlines()) for block in blocks)


def _line(text: str | None) -> str:
    return _cell(" ".join(inspect.cleandoc(text or "").split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _page(lines: list[str]) -> str:
    text = "\n".join(lines).strip() + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


PAGES: dict[str, Callable[[], str]] = {
    "tasks.md": tasks_page,
    "flows.md": flows_page,
    "clients.md": clients_page,
    "bridges.md": bridges_page,
    "middleware.md": middleware_page,
    "testing.md": testing_page,
    "engine.md": engine_page,
    "records.md": records_page,
    "errors.md": errors_page,
    "roles.md": roles_page,
}


def main() -> int:
    drifted = []
    for name, written in PAGES.items():
        file = TARGET / name
        text = written()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            drifted.append(name)
            if "--check" not in sys.argv[1:]:
                TARGET.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    if "--check" in sys.argv[1:] and drifted:
        print(f"docs/reference/ is out of date ({', '.join(drifted)}): run scripts/reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
