"""`flowfabric delete`, `redact`: remove an execution, or its payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowfabric.cli import _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._options import Dsn, Id, Json, Yes
from flowfabric.cli._program import confirm
from flowfabric.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId


def delete(execution: Id, yes: Yes = False, json: Json = False, dsn: Dsn = None) -> None:
    """Delete an ended execution and everything that belongs to it. Its events stay until their retention ends."""
    _erase(execution, lambda engine: engine.delete_execution, "delete", "deleted", yes=yes, json=json, dsn=dsn)


def redact(execution: Id, yes: Yes = False, json: Json = False, dsn: Dsn = None) -> None:
    """Remove input, results, failure messages, tags, key and reasons of an ended execution; its history stays."""
    _erase(execution, lambda engine: engine.redact_execution, "redact", "redacted", yes=yes, json=json, dsn=dsn)


def _erase(
    execution: str,
    choose: Callable[[Engine], Callable[[ExecutionId], Awaitable[None]]],
    verb: str,
    participle: str,
    *,
    yes: bool,
    json: bool,
    dsn: str | None,
) -> None:
    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        found = await engine.read_execution_info(target)
        if found is None:
            raise await missing(engine, target)
        kind = _output.printable(found.execution_kind)
        confirm(f"{verb} {target} ({kind}, {found.public_state})? It cannot be undone.", yes=yes)
        try:
            await choose(engine)(target)
        except NotFound:
            raise await missing(engine, target) from None
        if json:
            _output.document({"execution_id": target, "done": participle})
        else:
            _output.say(f"{target} {participle}")

    ask(dsn, work)
