"""`flowfabric workers`: show the workers that are alive and what they serve; remove one from the registry."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _completion, _output
from flowfabric.cli._database import ask, near
from flowfabric.cli._options import Dsn, Json, Wide
from flowfabric.cli._output import Column
from flowfabric.cli._program import Group, default_of
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.durations import counted
from flowfabric.values.page import everything

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from flowfabric.engine import Engine
    from flowfabric.values.worker import LiveVersion, WorkerRecord

app = typer.Typer(
    cls=Group, help="Show the workers that are alive; remove one from the registry.", invoke_without_command=True
)

Instance = Annotated[
    str,
    typer.Argument(
        metavar="INSTANCE",
        help="The instance id of a worker, or an end or beginning of one that is unique.",
        autocompletion=_completion.workers,
        show_default=False,
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="Only workers of this namespace.", show_default=False),
]
_EVENTS = 20
_LANES_WIDTH = 18
_NONE = "no worker is alive; start one with `flowfabric worker module:app`"


@app.command("list")
@default_of(app)
def list_(namespace: Namespace = None, wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """List the workers that are alive, what each serves and leads, and what waits although none of them covers it."""

    async def work(engine: Engine) -> None:
        found = await alive(engine, namespace)
        versions = await engine.list_versions()
        uncovered = await engine.list_uncovered()
        if json:
            _output.document({"workers": found, "versions": versions, "uncovered": uncovered})
            return
        if found:
            _output.table(*rows(found, await now(engine)), wide=wide)
        else:
            _output.note(_NONE)
        if versions:
            _output.heading("Versions with executions")
            _output.table(
                ["TASK", "VERSION", "EXECUTIONS", "WORKERS", "LANE"],
                [
                    (one.kind, one.version or "none", one.executions, one.live_workers or "none", one.lane_id)
                    for one in versions
                ],
            )
        # Versions without a worker are listed below.
        if missing := [one for one in uncovered if one.version is None]:
            _output.heading("Waiting for a worker that is not there")
            has_served = any(one.served for one in missing)
            _output.table(
                ["TASK", "NEEDS", "WAITING", "SINCE", "LANE", *(["EXCEPT NAMESPACES"] if has_served else [])],
                [
                    (
                        one.kind, ", ".join(one.capabilities), one.waiting, one.since, one.lane_id,
                        *([", ".join(one.served)] if has_served else []),
                    )
                    for one in missing
                ],
            )  # fmt: skip
        for one in versions:
            if not one.live_workers:
                _output.note(without_worker(one))
            elif one.version is None:
                _output.note(without_version(one))

    ask(dsn, work)


@app.command()
def show(instance: Instance, namespace: Namespace = None, json: Json = False, dsn: Dsn = None) -> None:
    """Show what a worker serves, where it runs, and what happened to it in the last 24 hours."""

    async def work(engine: Engine) -> None:
        one: WorkerRecord | None = None
        name, of = instance, namespace or ""
        try:
            one = await _find(engine, instance, namespace)
            name, of = one.worker_instance_id, one.namespace
        except NotFound:
            # One that is gone has only its events.
            if not (await engine.list_worker_events(name, namespace=of, limit=1)).items:
                raise
        page = await engine.list_worker_events(name, namespace=of, limit=_EVENTS)
        if json:
            _output.document({"worker": one, "events": list(page.items)})
            return
        if one is None:
            _output.say(f"{_output.printable(instance)} is not alive")
        else:
            _output.pairs(_facts(one, await now(engine)))
        _output.heading("Events, newest first")
        _output.table(
            ["TIME", "EVENT", Column("REASON", folds=True)],
            [(each.occurred_at, each.event, each.reason) for each in page.items],
        )

    ask(dsn, work)


@app.command()
def dead(
    instance: Instance,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; kept with the worker's events.")
    ] = "removed by an operator",
    namespace: Namespace = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Remove a worker from the registry. Its leases are left to expire; a worker that still runs registers again."""

    async def work(engine: Engine) -> None:
        from flowfabric.values.worker import Marked  # noqa: PLC0415

        one = await _find(engine, instance, namespace)
        done = await engine.mark_worker_dead(one.worker_instance_id, namespace=one.namespace, reason=reason)
        is_marked = isinstance(done, Marked)
        if json:
            _output.document({"worker_instance_id": one.worker_instance_id, "is_marked": is_marked})
        else:
            name = _output.printable(one.worker_instance_id)
            _output.say(f"{name} is removed" if is_marked else f"{name} was gone already")

    ask(dsn, work)


async def alive(engine: Engine, namespace: str | None = None) -> list[WorkerRecord]:
    """The workers that are alive, of one namespace or of all."""
    if namespace is not None:
        return await everything(lambda after, size: engine.list_workers(namespace, after=after, limit=size))
    return await everything(lambda after, size: engine.list_all_workers(after=after, limit=size))


def without_worker(one: LiveVersion) -> str:
    """That executions of a version wait for a worker, and which one."""
    where, count = f"{one.kind} in lane {one.lane_id}", counted(one.executions, "execution")
    if one.version is None:
        return f"no live worker serves {where} ({count} without a version); start one of any version"
    return (
        f"no live worker serves version {one.version} of {where} ({count}); start one with that version,"
        f" or one that says compatible_with=[{one.version}]"
    )


def without_version(one: LiveVersion) -> str:
    """That versions do not separate these executions."""
    count = counted(one.executions, "execution")
    return f"{count} of {one.kind} began without a version: workers of every version run them"


async def now(engine: Engine) -> datetime:
    """The time of the database, by which heartbeats are stored."""
    from datetime import UTC, datetime  # noqa: PLC0415

    return datetime.fromtimestamp(await engine.server_time_ms() / 1000, UTC)


def rows(found: Sequence[WorkerRecord], at: datetime) -> tuple[list[Column], list[tuple[Any, ...]]]:
    """The workers as a table. The end of an instance is enough for `workers show`."""
    has_namespaces = any(one.namespace for one in found)
    headers = [
        Column("HEARD"), Column("SLOTS", drop=3), Column("TASKS", drop=2), Column("LEADS", drop=1),
        Column("LANES", cut=7), *([Column("NAMESPACE", cut=9, drop=4)] if has_namespaces else []),
        Column("INSTANCE", cut=20, ends=True),
    ]  # fmt: skip
    return headers, [
        (
            _ago(at - one.last_heartbeat_at),
            one.slots,
            "all" if one.kinds is None else len(one.kinds),
            ", ".join(one.leads),
            _short(one.lanes),
            *([one.namespace] if has_namespaces else []),
            one.worker_instance_id,
        )
        for one in found
    ]


def _short(lanes: Sequence[str]) -> str:
    """The first lanes, and how many more there are."""
    shown = lanes[0]
    count = 1
    while count < len(lanes) and len(f"{shown}, {lanes[count]}") <= _LANES_WIDTH:
        shown, count = f"{shown}, {lanes[count]}", count + 1
    return shown if count == len(lanes) else f"{shown} +{len(lanes) - count}"


def _ago(span: timedelta) -> str:
    seconds = round(span.total_seconds())
    return "now" if seconds <= 0 else f"{_output.duration(timedelta(seconds=seconds))} ago"


def _facts(one: WorkerRecord, at: datetime) -> list[tuple[str, object]]:
    kinds = "every task" if one.kinds is None else ", ".join(_kind(*item) for item in one.kinds.items())
    return [
        ("instance", one.worker_instance_id),
        ("worker", one.worker_id),
        ("namespace", one.namespace or "every namespace"),
        ("lanes", ", ".join(one.lanes)),
        ("tasks", kinds),
        ("capabilities", ", ".join(one.capabilities)),
        ("slots", one.slots),
        ("leads", ", ".join(one.leads)),
        ("host", one.host),
        ("process", one.pid),
        ("package", None if one.package_version is None else f"flowfabric {one.package_version}"),
        ("registered", one.registered_at),
        ("heard from", _ago(at - one.last_heartbeat_at)),
        ("counts as absent", f"in {_output.duration(one.expires_at - at)} without a heartbeat"),
    ]


def _kind(name: str, versions: Sequence[int]) -> str:
    return f"{name} ({', '.join(map(str, versions))})" if versions else name


async def _find(engine: Engine, text: str, namespace: str | None) -> WorkerRecord:
    found = await alive(engine, namespace)
    named = [one for one in found if one.worker_instance_id == text]
    named = named or [one for one in found if one.worker_instance_id.endswith(text)]
    named = named or [one for one in found if one.worker_instance_id.startswith(text)]
    if len(named) == 1:
        return named[0]
    if named:
        for one in named[:10]:
            _output.note(_output.printable(f"{one.worker_instance_id}  {one.namespace}".rstrip()))
        raise InvalidInput(f"{len(named)} workers fit {text!r}", field="INSTANCE", allowed="more of it, or --namespace")
    hint = near(text, [one.worker_instance_id for one in found]) or "`flowfabric workers` lists those that are alive"
    raise NotFound("worker", _output.printable(text), detail=hint)
