"""Damaged rows, and the rule of the audit that must find them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest_asyncio

from tests.interleave import Party, Stage


@pytest_asyncio.fixture(name="engine", loop_scope="session")
async def one_party(stage: Stage) -> Party:
    """An engine on one connection, in the emptied database of the stage."""
    await stage.empty()
    (one,) = await stage.company(1)
    return one


@dataclass(frozen=True)
class Damage:
    """What is done to whom, and the rule that must say so."""

    rule: str
    place: str
    sql: str


async def found(stage: Stage, partition: int | None = None) -> set[str]:
    """Return the rules that are violated."""
    return {row["rule"] for row in await stage.watch.fetch("select rule from flowfabric.audit($1, true)", partition)}


async def finds(stage: Stage, rule: str, sql: str) -> None:
    """Do the damage, see that the rule finds it, and undo it."""
    await stage.watch.execute("begin")
    try:
        for statement in sql.split("; "):
            touched = await stage.watch.execute(statement)
            assert not touched.endswith(" 0"), "the damage must be done"
        assert rule in await found(stage)
    finally:
        await stage.watch.execute("rollback")
