"""`flowfabric quotas`: show quotas and how full they are; create, change or bind them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _binding, _completion, _output
from flowfabric.cli._database import ask, no_such
from flowfabric.cli._options import Dsn, Json, Wide, parse_duration
from flowfabric.cli._output import Column
from flowfabric.cli._program import NO, Group, default_of, exit_with
from flowfabric.cli._waiting import client_of
from flowfabric.errors import InvalidInput
from flowfabric.values.page import everything

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from flowfabric.engine import Engine
    from flowfabric.values.quota import QuotaKey, QuotaLimits, QuotaPolicy

app = typer.Typer(
    cls=Group, help="Show quotas and how full they are; create, change or bind them.", invoke_without_command=True
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The quota.", autocompletion=_completion.quotas, show_default=False)
]
Concurrent = Annotated[
    int | None,
    typer.Option("--concurrent", metavar="N", min=0, help="How many may run at once; 0 for any.", show_default=False),
]
Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="N/DURATION", help="How many may start: 600/60s; 0 for any.", show_default=False),
]
Jitter = Annotated[
    str | None,
    typer.Option("--jitter", metavar="DURATION", help="Spread retries over this time.", show_default=False),
]
_KEYS = 50
_HELD = 10


@app.command("list")
@default_of(app)
def list_(wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """List quotas: how many run and started, how many wait, and when the next may start."""

    async def work(engine: Engine) -> None:
        found = await everything(lambda after, size: engine.list_quota_policies(cursor=after, limit=size))
        found.sort(key=lambda one: (one.name is None, one.name or str(one.quota_policy_id)))
        if json:
            _output.document({"quotas": found})
        elif found:
            _output.table(*table(found), wide=wide)
        else:
            _output.note("there are no quotas")

    ask(dsn, work)


def table(found: Sequence[QuotaPolicy]) -> tuple[list[Column], list[tuple[object, ...]]]:
    """Quotas as a table. The numbers of one with a key are sums over its values, its limits hold for each."""
    columns = [
        Column("QUOTA", cut=14), Column("PER", cut=8, drop=1), Column("RUNNING"), Column("CAP"), Column("STARTED"),
        Column("RATE"), Column("WAITING"), Column("NEXT", drop=2),
    ]  # fmt: skip
    return columns, [
        (
            one.name or one.quota_policy_id, one.key or "", one.active, one.limits.active_concurrency_cap or "any",
            one.admitted, rate(one.limits), one.waiting or None, one.next_free_at,
        )
        for one in found
    ]  # fmt: skip


def rate(limits: QuotaLimits) -> str:
    """The rate of a quota in words."""
    if not limits.max_requests_per_window:
        return "any"
    span = _output.duration(timedelta(seconds=limits.requests_per_window_seconds or 60))
    return f"{limits.max_requests_per_window:,} in {span}"


@app.command()
def show(name: Name, wide: Wide = False, json: Json = False, dsn: Dsn = None) -> None:
    """Show a quota: its numbers, how full it is for each value of its key, and which executions wait."""

    async def work(engine: Engine) -> None:
        one = await find(engine, name)
        keys: Sequence[QuotaKey] = (await engine.list_quota_keys(one.quota_policy_id, limit=_KEYS)).items
        held = (await engine.list_held(one.quota_policy_id, limit=_HELD)).items
        bound = await _binding.bindings(engine, one.quota_policy_id)
        if json:
            _output.document({"quota": one, "keys": list(keys), "waiting": list(held), "bindings": bound})
            return
        limits = one.limits
        _output.pairs(
            [
                ("name", one.name),
                ("id", one.quota_policy_id),
                ("for each", one.key and f"value of the tag {one.key}"),
                ("may run", limits.active_concurrency_cap or "any number"),
                ("may start", rate(limits)),
                ("running", one.active),
                ("started", f"{one.admitted:,} within the window"),
                ("waiting", one.waiting),
                ("next start", one.next_free_at),
                ("created", one.created_at),
                ("changed", one.updated_at),
            ]
        )
        if one.key and keys:
            _output.heading(f"By {one.key}{f', the first {_KEYS}' if len(keys) == _KEYS else ''}")
            _output.table(
                [Column(one.key.upper(), cut=16), "RUNNING", "STARTED", "WAITING", "NEXT"],
                [(each.key, each.active, each.admitted, each.waiting, each.next_free_at) for each in keys],
                wide=wide,
            )
        _binding.show(bound)
        if held:
            _output.heading("Waiting for it, first in line first")
            _output.table(
                ["ID", Column("KIND", cut=12), Column("KEY", cut=12, drop=2), "SINCE", Column("NEXT TRY", drop=1)],
                [
                    (
                        each.execution_id,
                        each.execution_kind,
                        each.key if one.key else "",
                        each.blocked_at,
                        each.retry_at,
                    )
                    for each in held
                ],
                wide=wide,
            )

    ask(dsn, work)


@app.command()
def create(
    name: Name,
    concurrent: Concurrent = None,
    rate: Rate = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="TAG", help="The numbers hold for each value of this tag.", show_default=False),
    ] = None,
    jitter: Jitter = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Create a quota. One that exists is left as it is, and the command fails."""
    if not concurrent and rate is None:
        raise InvalidInput("no limit", field="create", allowed="--concurrent, --rate or both")
    most, window = parse_rate(rate)

    async def work(engine: Engine) -> int:
        is_new = await engine.get_quota_policy(name=name) is None
        made = await client_of(engine).create_quota(
            name,
            concurrent=concurrent or 0,
            per_window=most or 0,
            window=window or 60,
            key=key,
            jitter=parse_duration(jitter, "--jitter") if jitter else 0,
        )
        if json:
            _output.document({"quota": made})
        elif is_new:
            _output.say(f"{_output.printable(name)} created")
        else:
            _output.note(f"there is a quota {_output.printable(name)} already; `flowfabric quotas set` changes it")
        return 0 if is_new else NO

    exit_with(ask(dsn, work))


@app.command("set")
def set_(
    name: Name,
    concurrent: Concurrent = None,
    rate: Rate = None,
    jitter: Jitter = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Change the numbers of a quota; what is not given stays. Executions that there is room for start."""
    if concurrent is None and rate is None and jitter is None:
        raise InvalidInput("nothing to set", field="set", allowed="--concurrent, --rate or --jitter")
    most, window = parse_rate(rate)

    async def work(engine: Engine) -> None:
        target = (await find(engine, name)).quota_policy_id
        await engine.update_quota_policy(
            target,
            window=window,
            max_requests_per_window=most,
            max_concurrent=concurrent,
            jitter=None if jitter is None else parse_duration(jitter, "--jitter"),
        )
        found = await engine.get_quota_policy(target)
        if json:
            _output.document({"quota": found})
        else:
            _output.say(f"{_output.printable(name)} changed")

    ask(dsn, work)


def parse_rate(text: str | None) -> tuple[int | None, timedelta | None]:
    """`600/60s`: how many per window. `0` alone is no rate."""
    if text is None:
        return None, None
    count, slash, window = text.partition("/")
    allowed = "N/DURATION such as 600/60s, or 0"
    if not count.isdecimal() or not count.isascii() or (not slash and int(count)):
        raise InvalidInput(f"got {text!r}", field="--rate", allowed=allowed)
    span = parse_duration(window, "--rate") if slash else None
    if span is not None and (span < timedelta(seconds=1) or span % timedelta(seconds=1)):
        raise InvalidInput(f"got {text!r}", field="--rate", allowed=f"{allowed}; the window in whole seconds")
    return int(count), span


async def find(engine: Engine, name: str) -> QuotaPolicy:
    """The quota of this name; `NotFound` suggests similar ones."""
    found = await engine.get_quota_policy(name=name)
    if found is not None:
        return found
    known = [one.name for one in (await engine.list_quota_policies(limit=1000)).items if one.name]
    raise no_such("quota", name, known, none="there are none yet")


async def _id(engine: Engine, name: str) -> UUID:
    return (await find(engine, name)).quota_policy_id


_binding.add_commands(app, "quota", _id)
