"""Damaged rows, and the rule of the audit that must find them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.interleave import Stage


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
