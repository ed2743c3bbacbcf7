"""Suggestions for shell completion. Fast and silent: better none than late ones."""

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
    """States that begin with the text."""
    return [state.value for state in State if state.value.startswith(incomplete)]


def lanes(ctx: Any, incomplete: str) -> list[str]:
    """Lanes that begin with the text, if an address is configured: completion starts no server."""
    from flowfabric.cli._database import lane_names  # noqa: PLC0415

    return _ask(ctx, incomplete, lane_names)


def schedules(ctx: Any, incomplete: str) -> list[str]:
    """Schedules that begin with the text."""

    async def names(engine: Engine) -> list[str]:
        return [schedule.name for schedule in (await engine.list_schedules(limit=1000)).items]

    return _ask(ctx, incomplete, names)


def budgets(ctx: Any, incomplete: str) -> list[str]:
    """Budgets that begin with the text, without those of single runs."""

    async def names(engine: Engine) -> list[str]:
        found = (await engine.list_budgets(prefix=incomplete or None, limit=1000)).items
        return [one.name for one in found if one.owner_id is None]

    return _ask(ctx, incomplete, names)


def quotas(ctx: Any, incomplete: str) -> list[str]:
    """Quotas that begin with the text."""

    async def names(engine: Engine) -> list[str]:
        found = (await engine.list_quota_policies(name_prefix=incomplete or None, limit=1000)).items
        return sorted(one.name for one in found if one.name)

    return _ask(ctx, incomplete, names)


def limits(ctx: Any, incomplete: str) -> list[str]:
    """Budgets and quotas that begin with the text."""
    return [*budgets(ctx, incomplete), *quotas(ctx, incomplete)]


def limit_of_group(ctx: Any, incomplete: str) -> list[str]:
    """Budgets in `flowfabric budgets`, quotas in `flowfabric quotas`."""
    return (quotas if ctx.parent.info_name == "quotas" else budgets)(ctx, incomplete)


def workers(ctx: Any, incomplete: str) -> list[str]:
    """Live workers whose instance ids begin with the text."""

    async def instances(engine: Engine) -> list[str]:
        return [one.worker_instance_id for one in (await engine.list_all_workers(limit=1000)).items]

    return _ask(ctx, incomplete, instances)


def flows(ctx: Any, incomplete: str) -> list[str]:
    """Ids of the newest flows that begin with the text."""

    async def ids(engine: Engine) -> list[str]:
        return [str(one.flow_id) for one in (await engine.find_flows(limit=1000)).items]

    return _ask(ctx, incomplete, ids)


def flow_names(ctx: Any, incomplete: str) -> list[str]:
    """Names of the newest flows that begin with the text."""

    async def names(engine: Engine) -> list[str]:
        return list(dict.fromkeys(one.flow_kind for one in (await engine.find_flows(limit=1000)).items))

    return _ask(ctx, incomplete, names)


def waiting(ctx: Any, incomplete: str) -> list[str]:
    """Executions that wait for a signal, by their ids."""

    async def uuids(engine: Engine) -> list[str]:
        return list(dict.fromkeys(str(one.execution_id) for one in (await engine.list_waits(limit=1000)).items))

    return _ask(ctx, incomplete, uuids)


def waitpoint_keys(ctx: Any, incomplete: str) -> list[str]:
    """Keys of open waitpoints: those of the execution named on the command line, or all."""

    async def keys(engine: Engine) -> list[str]:
        # While an option's value is being typed, the arguments before it are not parsed yet.
        wanted = str(ctx.params.get("execution") or ctx.params.get("token") or next(iter(ctx.args), ""))
        found = (await engine.list_waits(limit=1000)).items
        return list(dict.fromkeys(one.waitpoint_key for one in found if str(one.execution_id).endswith(wanted)))

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
