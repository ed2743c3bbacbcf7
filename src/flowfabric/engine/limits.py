"""Limits by name: which budgets and quotas are stored, and which declarations of an app were stored last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_batch
from flowfabric.values.checks import check_text
from flowfabric.values.spending import FoundLimit, check_limit_name


class LimitLookups(Operations):
    """find_limits, read_declared_limits, note_declared_limits."""

    async def find_limits(self, budgets: Sequence[str], quotas: Sequence[str]) -> list[FoundLimit]:
        """Return the budgets and quotas with these names, up to 1,000 of each; unknown names are left out."""
        found = await self._fetch(
            statements.FIND_LIMITS, _names(budgets, "budgets"), _names(quotas, "quotas"), repeatable=True
        )
        return [FoundLimit(what=row["what"], name=row["name"], id=row["id"], key=row["key"]) for row in found]

    async def read_declared_limits(self, names: Sequence[str]) -> dict[str, str]:
        """Return the digests of the declarations that were stored last, by name."""
        found = await self._fetch(statements.READ_DECLARED_LIMITS, _names(names, "names"), repeatable=True)
        return {row["name"]: row["digest"] for row in found}

    async def note_declared_limits(self, digests: Mapping[str, str]) -> None:
        """Note that declarations were stored: a worker with the same ones leaves the limits as operators set them."""
        names = _names(list(digests), "digests")
        words = [check_text(digests[name], "digests") for name in names]
        await self._fetch(statements.NOTE_DECLARED_LIMITS, names, words, repeatable=True)


def _names(given: Sequence[str], field: str) -> list[str]:
    check_batch(given, field)
    return [check_limit_name(name, field) for name in given]
