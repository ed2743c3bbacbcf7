"""The audit finds damage to limit sets, slots and executions that limits hold."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from tests.support import submit

ONE = UUID(int=1)


async def _limited(engine: ff.Engine) -> None:
    await submit(engine, policy={"budget_ids": [str(ONE)]})


DAMAGES: dict[str, tuple[Any, list[str]]] = {
    "limit_set": (
        _limited,
        [
            "delete from flowfabric.limit_set",
            "update flowfabric.route set limited = false",
            "update flowfabric.execution set limits = null",
        ],
    ),
}


@pytest.mark.parametrize("rule", DAMAGES)
async def test_damage_is_found(plain_engine: ff.Engine, sql: asyncpg.Connection[Any], rule: str) -> None:
    prepare, damages = DAMAGES[rule]
    await prepare(plain_engine)
    assert await plain_engine.audit(events=True) == []
    for damage in damages:
        transaction = sql.transaction()
        await transaction.start()
        await sql.execute(damage)
        found = {row["rule"] for row in await sql.fetch("select rule from flowfabric.audit(null, true)")}
        await transaction.rollback()
        assert rule in found, damage
