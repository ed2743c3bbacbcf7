"""`flowfabric waits`: list waitpoints, or print the token of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import _completion, _output, _waiting
from flowfabric.cli._database import ask, resolve, unknown_lane
from flowfabric.cli._filters import Lane
from flowfabric.cli._options import Dsn, Json, Namespace, Wide
from flowfabric.cli._output import Column
from flowfabric.cli._pages import Cursor, Limit, up_to
from flowfabric.cli.signals import refused_as
from flowfabric.errors import InvalidInput, StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowfabric.engine import Engine
    from flowfabric.values.page import Page
    from flowfabric.values.wait import Wait


def waits(
    lane: Lane = None,
    namespace: Namespace = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            "-k",
            metavar="KEY",
            help="Only waitpoints with this key.",
            autocompletion=_completion.waitpoint_keys,
            show_default=False,
        ),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="ID",
            help="Print one waitpoint's token and callback link instead of the list (use --key if it has several)."
            " Keep them secret: anyone who has one can signal.",
            autocompletion=_completion.waiting,
            show_default=False,
        ),
    ] = None,
    wide: Wide = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the waitpoints that can be signalled, longest waiting first, with their deadlines."""
    if token is not None and (lane is not None or namespace is not None or cursor is not None):
        raise InvalidInput("given with a filter", field="--token", allowed="with --key alone")

    async def work(engine: Engine) -> None:
        if token is not None:
            await _reveal(engine, token, key, as_json=json)
            return

        async def fetch(after: str | None, size: int) -> Page[Wait, str]:
            return await engine.list_waits(
                lane_id=lane, namespace=namespace, waitpoint_key=key, cursor=after, limit=size
            )

        found, rest = await up_to(limit, fetch, cursor)
        if json:
            _output.document({"items": found, "next_cursor": rest})
            return
        if found:
            _output.table(*columns(found), wide=wide)
        else:
            _output.note((lane and await unknown_lane(engine, [lane])) or "no execution waits for a signal")
        if rest is not None:
            _output.note(f"there is more: --limit, or --cursor {rest}")

    ask(dsn, work)


def columns(found: Sequence[Wait]) -> tuple[list[Column], list[list[object]]]:
    """Waitpoints as a table."""
    has_namespace = any(one.namespace for one in found)
    headers = [
        Column("ID"), Column("TASK", cut=12), Column("LANE", cut=7, drop=6),
        *[Column("NAMESPACE", cut=9, drop=5)] * has_namespace, Column("KEY", cut=10), Column("FOR", cut=10, drop=2),
        Column("SINCE", drop=1), Column("DEADLINE"), Column("THEN"), Column("SIGNALS", drop=4),
        Column("NAMES", cut=10, drop=3),
    ]  # fmt: skip
    rows: list[list[object]] = [
        [
            one.execution_id,
            one.execution_kind,
            one.lane_id,
            *[one.namespace] * has_namespace,
            one.waitpoint_key,
            _waiting.reason(one.reason, one.state),
            one.since,
            one.timeout_at,
            _waiting.then(one.timeout_behavior, one.timeout_at is not None, one.state),
            _waiting.counted(one.signal_count, one.refused_signal_count),
            _waiting.names(one.required_signal_names, one.state),
        ]
        for one in found
    ]
    return headers, rows


async def _reveal(engine: Engine, execution: str, key: str | None, *, as_json: bool) -> None:
    from flowfabric.bridges.callbacks import link_to  # noqa: PLC0415
    from flowfabric.values.callback import callback_text  # noqa: PLC0415

    target = await resolve(engine, execution)
    async with refused_as(engine, target, key):
        waitpoint = await _waiting.waitpoint_of(engine, target, key)
        token = await engine.read_waitpoint_token(target, waitpoint.waitpoint_id)
        if token is None:
            raise StateError("waitpoint_closed", execution_id=target)
    fields = {
        "execution_id": target,
        "waitpoint_id": waitpoint.waitpoint_id,
        "waitpoint_key": waitpoint.waitpoint_key,
        "token": token.reveal(),
        "callback": (callback := callback_text(target, waitpoint.waitpoint_id, token)),
        "link": link_to(callback),
    }
    if as_json:
        _output.document(fields)
    else:
        _output.pairs((name.removesuffix("_id").replace("waitpoint_", ""), value) for name, value in fields.items())
        _output.note("anyone who has the token or the callback can signal: keep them out of logs and chats")
