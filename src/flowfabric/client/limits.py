"""Budgets and quotas by name: those that the app declares, and those that are stored.

A name that an option uses must be one of them. Submissions look names up in the database that the app does not declare,
once per process, in one call for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from msgspec import UNSET

from flowfabric.errors import InvalidInput
from flowfabric.values.binding import is_bound
from flowfabric.values.budget import BudgetStatus, budget_id_of
from flowfabric.values.ids import BudgetId, ExecutionId, FlowId, QuotaPolicyId
from flowfabric.values.options import DEFAULT_LANE, Options, meant
from flowfabric.values.quota import quota_policy_id_of
from flowfabric.values.spending import NO_LIMITS, BudgetSpec, FoundLimit, Limits, QuotaSpec, changes_of

if TYPE_CHECKING:
    from flowfabric.client.connector import Graph
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

    def limits(
        self, options: Options, kind: str | None = None, flow: str | None = None, *, are_stored: bool = True
    ) -> Limits:
        """Return the limits that options name; `InvalidInput` for a name that is not known.

        With the kind of a submission, and of its flow if it is a node: also those that the app binds to it and that
        are not stored yet. Once they are, the database adds them.
        `are_stored=False`: they are for later, when a worker has stored what the app declares.
        """
        bound_budgets, bound_quotas = self._bound(options, kind, flow)
        if not options.names_limits and not bound_budgets and not bound_quotas:
            return NO_LIMITS
        budgets = () if options.budgets is UNSET else options.budgets
        quotas = () if options.quotas is UNSET else options.quotas
        for name in bound_quotas:
            self._refuse_keyed(name, self.quotas[name].key)
        return Limits(
            tuple(dict.fromkeys(BudgetId(self.budget(name)) for name in (*budgets, *bound_budgets))),
            tuple(
                dict.fromkeys(
                    [
                        *(QuotaPolicyId(self._quota(name, options.tags, are_stored=are_stored)) for name in quotas),
                        *(QuotaPolicyId(quota_policy_id_of(name)) for name in bound_quotas),
                    ]
                )
            ),
        )

    @property
    def has_bindings(self) -> bool:
        """Whether the app binds limits to scopes."""
        return any(one.bind for declared in (self.budgets, self.quotas) for one in declared.values())

    def _bound(self, options: Options, kind: str | None, flow: str | None) -> tuple[list[str], list[str]]:
        """Return the budgets and quotas that the app binds to a submission, without those that were found."""
        if kind is None:
            return [], []
        scope: dict[str, Any] = {
            "lane": DEFAULT_LANE if options.lane is UNSET else options.lane,
            "kind": kind,
            "namespace": "" if options.namespace is UNSET else options.namespace,
            "tags": options.tags,
            "flow": flow,
        }

        def chosen(what: str, declared: Mapping[str, BudgetSpec | QuotaSpec]) -> list[str]:
            return [
                name
                for name, one in declared.items()
                if one.bind and (what, name) not in self._found and any(is_bound(bind, **scope) for bind in one.bind)
            ]

        return chosen("budget", self.budgets), chosen("quota", self.quotas)

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
        if are_stored and ("quota", name) not in self._found:
            self._refuse_keyed(name, key)
        return quota_policy_id_of(name) if found is None else found.id

    @staticmethod
    def _refuse_keyed(name: str, key: str | None) -> None:
        if key is not None:
            raise InvalidInput(
                f"the quota {name!r} is declared but not stored, and would count without its key {key!r}",
                field="quotas",
                allowed="after `await app.prepare()`, or once a worker of the app has started",
            )

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

    def unknown(
        self, options: Options, kind: str | None = None, flow: str | None = None
    ) -> tuple[list[str], list[str]]:
        """Return the budgets and quotas of a submission that have to be looked up: see `limits`."""
        budgets = () if options.budgets is UNSET else options.budgets
        quotas = () if options.quotas is UNSET else options.quotas
        bound_budgets, bound_quotas = self._bound(options, kind, flow)
        return (
            [
                *(name for name in budgets if name not in self.budgets and ("budget", name) not in self._found),
                *bound_budgets,
            ],
            # The key of a keyed one is read when the submission is stored: the policy must be stored before.
            [
                *(
                    name
                    for name in quotas
                    if ("quota", name) not in self._found
                    and (name not in self.quotas or self.quotas[name].key is not None)
                ),
                *bound_quotas,
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


def may_have_limits(submission: Submission) -> bool:
    """Whether a submission or the task of a hook names limits, or the app binds some."""
    task, options = submission.task, submission.options
    return (
        options.names_limits
        or task.limit_names.has_bindings
        or any(hook.defaults.names_limits for hook in task.hook_tasks(options, nested=False).values())
    )


async def learn(source: Source, submissions: Iterable[Submission], flow: str | None = None) -> None:
    """Look up the limits of submissions that this process does not know yet, in one call. `flow`: they are nodes."""
    wanted = [one for one in submissions if may_have_limits(one)]
    hooks = [hook for one in wanted for hook in one.task.hook_tasks(one.options, nested=False).values()]
    unknown = [(one.task.limit_names, one.task.limit_names.unknown(one.options, one.kind, flow)) for one in wanted]
    await look_up(source, unknown + [(hook.limit_names, hook.limit_names.unknown(hook.defaults)) for hook in hooks])


async def look_up(source: Source, unknown: Iterable[tuple[LimitNames, tuple[list[str], list[str]]]]) -> None:
    """Look up budgets and quotas by name, in one call."""
    wanted = [(names, budgets, quotas) for names, (budgets, quotas) in unknown if budgets or quotas]
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
    engine: Engine, owner: ExecutionId | FlowId, amounts: Mapping[str, int] | None, dimensions: Mapping[str, int]
) -> BudgetStatus:
    """Raise the budget that an execution or a flow was submitted with."""
    return await engine.update_budget(owner_id=owner, raise_by=changes_of(amounts, dimensions, "amounts"))


def flow_kind(flow: Graph) -> str | None:
    """Return the kind of a flow; None if it grows, and was given one before."""
    return flow.name if flow.grows is None else None


async def learn_of_flow(source: Source, flow: Graph, changed: Mapping[str, Submission] | None) -> None:
    """The same for the nodes of a flow; `changed` are their submissions after the middleware."""
    await learn(source, (changed or flow.submissions()).values(), flow_kind(flow))
