"""Budgets and quotas by name: those that the app declares, and those that are stored.

A name that an option uses must be one of them. Submissions look names up in the database that the app does not declare,
once per process, in one call for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from msgspec import UNSET

from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.budget import BudgetStatus, budget_id_of
from flowfabric.values.ids import BudgetId, ExecutionId, QuotaPolicyId
from flowfabric.values.options import Options, meant
from flowfabric.values.quota import quota_policy_id_of
from flowfabric.values.spending import NO_LIMITS, BudgetSpec, FoundLimit, Limits, QuotaSpec, changes_of

if TYPE_CHECKING:
    from flowfabric.client.submission import Submission
    from flowfabric.engine import Engine


class Source(Protocol):
    """Where stored limits are found: the engine, or the caller's transaction."""

    async def find_limits(self, budgets: Sequence[str], quotas: Sequence[str], /) -> list[FoundLimit]: ...


class LimitNames:
    """The budgets and quotas that an app declares, and those that were found in its database."""

    def __init__(self) -> None:
        self.budgets: dict[str, BudgetSpec] = {}
        self.quotas: dict[str, QuotaSpec] = {}
        self._found: dict[tuple[str, str], FoundLimit] = {}

    def limits(self, options: Options, *, are_stored: bool = True) -> Limits:
        """Return the limits that options name; `InvalidInput` for a name that is not known.

        `are_stored=False`: they are for later, when a worker has stored what the app declares.
        """
        if not options.names_limits:
            return NO_LIMITS
        budgets = () if options.budgets is UNSET else options.budgets
        quotas = () if options.quotas is UNSET else options.quotas
        return Limits(
            tuple(BudgetId(self.budget(name)) for name in budgets),
            tuple(QuotaPolicyId(self._quota(name, options.tags, are_stored=are_stored)) for name in quotas),
        )

    def budget(self, name: str) -> UUID:
        """Return the id of a budget."""
        return budget_id_of(name) if name in self.budgets else self._stored("budget", name).id

    def _quota(self, name: str, tags: Mapping[str, str] | None, *, are_stored: bool) -> UUID:
        declared = self.quotas.get(name)
        found = None if declared is not None else self._stored("quota", name)
        key = declared.key if declared is not None else None if found is None else found.key
        if key is not None and key not in (tags or {}):
            raise InvalidInput(
                f"the quota {name!r} counts per value of the tag {key!r}, which is missing",
                field="tags",
                allowed=f"tags with {key!r}",
            )
        if are_stored and key is not None and ("quota", name) not in self._found:
            raise InvalidInput(
                f"the quota {name!r} is declared but not stored, and would count without its key {key!r}",
                field="quotas",
                allowed="after `await app.prepare()`, or once a worker of the app has started",
            )
        return quota_policy_id_of(name) if found is None else found.id

    def _stored(self, what: str, name: str) -> FoundLimit:
        found = self._found.get((what, name))
        if found is None:
            declared = self.budgets if what == "budget" else self.quotas
            near = meant(name, [*declared, *(known for kind, known in self._found if kind == what)])
            raise InvalidInput(
                f"there is no {what} {name!r}" + (f"; {near}" if near else ""),
                field=f"{what}s",
                allowed=f"declared with app.{what}(), or created",
            )
        return found

    def unknown(self, options: Options) -> tuple[list[str], list[str]]:
        """Return the budgets and quotas that options name and that have to be looked up."""
        budgets = () if options.budgets is UNSET else options.budgets
        quotas = () if options.quotas is UNSET else options.quotas
        return (
            [name for name in budgets if name not in self.budgets and ("budget", name) not in self._found],
            # What a keyed one counts by is decided when the submission is stored: it must be known there.
            [
                name
                for name in quotas
                if ("quota", name) not in self._found and (name not in self.quotas or self.quotas[name].key is not None)
            ],
        )

    def found(self, limits: Iterable[FoundLimit]) -> None:
        """Remember stored limits."""
        self._found.update({(one.what, one.name): one for one in limits})

    def name_of(self, budget_id: UUID) -> str | None:
        """Return the name of a budget that is known here."""
        declared = (name for name in self.budgets if budget_id_of(name) == budget_id)
        stored = (one.name for one in self._found.values() if one.id == budget_id)
        return next(declared, None) or next(stored, None)


async def learn(source: Source, named: Iterable[tuple[LimitNames, Options]]) -> None:
    """Look up the names that options use and no app declares, in one call."""
    wanted = [(names, *names.unknown(options)) for names, options in named if options.names_limits]
    budgets = sorted({name for _, some, _ in wanted for name in some})
    quotas = sorted({name for _, _, some in wanted for name in some})
    if budgets or quotas:
        stored = await source.find_limits(budgets, quotas)
        for names, *_ in wanted:
            names.found(stored)


async def owned_budget(engine: Engine, owner: UUID) -> BudgetStatus | None:
    """Return the budget that an execution or a flow was submitted with."""
    found = (await engine.list_budgets(owner_id=ExecutionId(owner), limit=1)).items
    return found[0] if found else None


async def raise_owned(
    engine: Engine, owner: UUID, what: str, amounts: Mapping[str, int] | None, dimensions: Mapping[str, int]
) -> BudgetStatus:
    """Raise the budget that an execution or a flow was submitted with."""
    changes = changes_of(amounts, dimensions, "amounts")
    owned = await owned_budget(engine, owner)
    if owned is None:
        raise NotFound("budget", detail=f"{what} {owner} was submitted without a budget of its own")
    return await engine.update_budget(owned.budget_id, raise_by=changes)


class _Nodes(Protocol):
    def submissions(self) -> dict[str, Submission]: ...


async def learn_of_flow(source: Source, flow: _Nodes, changed: Mapping[str, Submission] | None) -> None:
    """The same for the nodes of a flow; `changed` are their submissions after the middleware."""
    submissions = (changed or flow.submissions()).values()
    await learn(source, [(one.task.limit_names, one.options) for one in submissions])
