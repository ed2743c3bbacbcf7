"""Words for the shell to complete. Quick and silent: no answer is better than a late one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from flowfabric import settings
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.engine import Engine

_PATIENCE = 1.0


def states(incomplete: str) -> list[str]:
    """The states that begin so."""
    return [state.value for state in State if state.value.startswith(incomplete)]


def lanes(ctx: Any, incomplete: str) -> list[str]:
    """The lanes that begin so, if a server is known: none is started for this."""
    from flowfabric.cli._database import lane_names  # noqa: PLC0415

    return _ask(ctx, incomplete, lane_names)


def schedules(ctx: Any, incomplete: str) -> list[str]:
    """The schedules that begin so."""

    async def names(engine: Engine) -> list[str]:
        return [schedule.name for schedule in (await engine.list_schedules(limit=1000)).items]

    return _ask(ctx, incomplete, names)


def flows(ctx: Any, incomplete: str) -> list[str]:
    """The ids of flows that begin so, of the newest."""

    async def ids(engine: Engine) -> list[str]:
        return [str(one.flow_id) for one in (await engine.find_flows(limit=1000)).items]

    return _ask(ctx, incomplete, ids)


def flow_names(ctx: Any, incomplete: str) -> list[str]:
    """The names of flows that begin so, of the newest."""

    async def names(engine: Engine) -> list[str]:
        return list(dict.fromkeys(one.flow_kind for one in (await engine.find_flows(limit=1000)).items))

    return _ask(ctx, incomplete, names)


def waiting(ctx: Any, incomplete: str) -> list[str]:
    """The executions that wait for a signal, by the uuids in their ids."""

    async def uuids(engine: Engine) -> list[str]:
        return list(dict.fromkeys(str(one.execution_id.uuid) for one in (await engine.list_waits(limit=1000)).items))

    return _ask(ctx, incomplete, uuids)


def waitpoint_keys(ctx: Any, incomplete: str) -> list[str]:
    """The keys at which something waits: of the execution named before, or of all."""

    async def keys(engine: Engine) -> list[str]:
        # An option whose value is not there yet leaves the arguments before it unread.
        wanted = str(ctx.params.get("execution") or ctx.params.get("token") or next(iter(ctx.args), ""))
        found = (await engine.list_waits(limit=1000)).items
        return list(dict.fromkeys(one.waitpoint_key for one in found if one.execution_id.endswith(wanted)))

    return _ask(ctx, incomplete, keys)


def _ask(ctx: Any, incomplete: str, work: Any) -> list[str]:
    dsn = ctx.params.get("dsn") or settings.load().dsn
    if not dsn:
        return []

    async def asked() -> list[str]:
        from flowfabric.engine import Engine  # noqa: PLC0415

        async with asyncio.timeout(_PATIENCE):
            engine = await Engine.connect(dsn, max_size=1, notifications=False, prepared_statements=False)
        async with engine, asyncio.timeout(_PATIENCE):
            names: list[str] = await work(engine)
            return names

    with contextlib.suppress(Exception):
        return [name for name in asyncio.run(asked()) if name.startswith(incomplete)]
    return []
