"""Budgets: what may be used, what is used, the ledger of what was spent."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta, Struct

from flowfabric.errors import InvalidInput, NotFound
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.members import Limit, named, span
from flowfabric.server.namespace import NAMESPACE, is_own_budget, own_budget, own_execution, own_executions
from flowfabric.server.operation import Operation, Repeats, Scope, Within
from flowfabric.server.problems import Problem
from flowfabric.server.versions import check_match, tag_of, unchanged
from flowfabric.values.budget import (
    MAX_AMOUNT,
    BudgetCreated,
    BudgetExists,
    BudgetReset,
    BudgetStatus,
    ExecutionUsage,
    ReportAnswer,
    SpendEntry,
    budget_id_of,
)
from flowfabric.values.ids import BudgetId, ExecutionId, parse_uuid

Amounts = dict[str, Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]]
Changes = dict[str, Annotated[int, Meta(ge=-MAX_AMOUNT, le=MAX_AMOUNT)]]


class ListBudgets(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`namespace`: of this namespace only, which is the scope of a budget."""

    namespace: str | None = None
    scope_type: str | None = None
    scope_id: str | None = None
    exhausted: bool | None = None
    prefix: str | None = None
    cursor: str | None = None
    limit: Limit = 100


class CreateBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`namespace` is short for a scope of this type and id. A limit of 0 is none."""

    name: str | None = None
    budget_id: UUID | None = None
    namespace: str | None = None
    scope_type: str = ""
    scope_id: str = ""
    hard_limits: Amounts = {}
    soft_limits: Amounts = {}
    enforcement_mode: Literal["strict", "warn"] = "strict"
    on_hard_limit: str = ""
    on_soft_limit: str = ""
    reset_interval_seconds: float = 0


class UpdateBudget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hard_limits` and `soft_limits` set limits (0: none), `raise_by` adds to hard limits, or takes away."""

    hard_limits: Amounts | None = None
    soft_limits: Amounts | None = None
    raise_by: Changes | None = None
    enforcement_mode: Literal["strict", "warn"] | None = None
    on_hard_limit: str | None = None
    on_soft_limit: str | None = None
    reset_interval_seconds: float | None = None


class ReportUsage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    usage: Amounts


class RecordSpend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    execution_id: ExecutionId
    usage: Amounts


class ReleaseSpend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    execution_id: ExecutionId


class ListSpend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    execution_id: ExecutionId | None = None
    cursor: str | None = None
    limit: Limit = 100


class ReadUsage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`children`: also what it submitted."""

    children: bool = True
    limit: Limit = 100
    cursor: str | None = None


class SpendReleased(Struct, frozen=True, kw_only=True):
    """The ledger has nothing of this execution in the current generation."""

    budget_id: BudgetId
    execution_id: ExecutionId


async def list_budgets(call: Call) -> Page:
    """List budgets by name, with what is used and held of each."""
    asked: ListBudgets = call.query
    scope_type, scope_id = asked.scope_type, asked.scope_id
    if call.namespace is not None:
        if scope_type not in (None, NAMESPACE) or scope_id not in (None, call.namespace):
            return Page(items=())
        scope_type, scope_id = NAMESPACE, call.namespace
    page = await call.engine.list_budgets(
        scope_type=scope_type,
        scope_id=scope_id,
        exhausted=asked.exhausted,
        prefix=asked.prefix,
        cursor=asked.cursor,
        limit=asked.limit,
    )
    return Page(items=page.items, next_cursor=page.next_cursor)


async def create_budget(call: Call) -> Answer:
    """Create a budget. One that exists is left as it is, even if its definition differs.

    A dimension is any name: `tokens`, `cost_micros`, `calls`. Without a `budget_id` the name decides it. The budgets
    of a namespace are those that keys of this namespace see and change.
    """
    asked: CreateBudget = call.body
    scope_type, scope_id = asked.scope_type, asked.scope_id
    if call.namespace is not None:
        if (scope_type, scope_id) not in (("", ""), (NAMESPACE, call.namespace)):
            raise InvalidInput(
                f"got {scope_type} {scope_id}", field="scope_type", allowed=f"no scope, or namespace {call.namespace}"
            )
        scope_type, scope_id = NAMESPACE, call.namespace
    if call.caller.namespaces is not None:
        await _refuse_foreign(call, asked)
    dimensions = list(dict.fromkeys((*asked.hard_limits, *asked.soft_limits)))
    with named(dimensions="hard_limits", reset_interval="reset_interval_seconds"):
        found = await call.engine.create_budget(
            None if asked.budget_id is None else BudgetId(asked.budget_id),
            name=asked.name,
            scope_type=scope_type,
            scope_id=scope_id,
            enforcement_mode=asked.enforcement_mode,
            on_hard_limit=asked.on_hard_limit,
            on_soft_limit=asked.on_soft_limit,
            reset_interval=span(asked.reset_interval_seconds, "reset_interval_seconds") or timedelta(0),
            dimensions=dimensions,
            hard_limits=[asked.hard_limits.get(one, 0) for one in dimensions],
            soft_limits=[asked.soft_limits.get(one, 0) for one in dimensions],
        )
    return Answer(body=found, status=201 if isinstance(found, BudgetCreated) else 200, target=str(found.budget_id))


async def _refuse_foreign(call: Call, asked: CreateBudget) -> None:
    """Names and ids are of the whole deployment: refuse one that another namespace has, without saying whose it is."""
    known = await call.engine.find_budgets([] if asked.name is None else [asked.name])
    ids = {*known.values()}
    if asked.budget_id is not None:
        ids.add(BudgetId(asked.budget_id))
    elif asked.name is not None:
        ids.add(budget_id_of(asked.name))
    for one in ids:
        try:
            found = await call.engine.get_budget_status(one)
        except NotFound:
            continue
        if not is_own_budget(call.caller, found):
            raise Problem(409, "conflict", "the name or id is taken")


async def get_budget(call: Call) -> Answer:
    """Read a budget: its limits, what is used and held, when it begins again."""
    found = await _own(call)
    return Answer(body=found, etag=_tag(found))


async def update_budget(call: Call) -> Answer:
    """Change a budget: raise or lower limits, its mode, its period. Usage stays, and executions that it held continue.

    A limit below the usage exhausts the budget. With `If-Match`, the `ETag` of the budget as it was read, nothing
    changes if its definition has changed since; its usage may have.
    """
    asked: UpdateBudget = call.body
    found = await _own(call)
    is_fixed = check_match(call, _tag(found))
    with unchanged(), named(hard="hard_limits", soft="soft_limits", reset_interval="reset_interval_seconds"):
        changed = await call.engine.update_budget(
            found.budget_id,
            hard=asked.hard_limits,
            soft=asked.soft_limits,
            raise_by=asked.raise_by,
            enforcement_mode=asked.enforcement_mode,
            on_hard_limit=asked.on_hard_limit,
            on_soft_limit=asked.on_soft_limit,
            reset_interval=span(asked.reset_interval_seconds, "reset_interval_seconds"),
            defined_at=found.defined_at if is_fixed else None,
        )
    return Answer(body=changed, etag=_tag(changed))


async def report_usage(call: Call) -> ReportAnswer:
    """Count usage in a budget without a lease, and say whether a limit is passed.

    `hard_breach`: nothing was counted, as it does not fit. A repetition with the same `Idempotency-Key` within 24
    hours is `already_applied` and counts nothing.
    """
    found = await _own(call)
    with named(dimensions="usage", deltas="usage"):
        return await call.engine.report_usage_admin(
            found.budget_id,
            dimensions=list(call.body.usage),
            deltas=list(call.body.usage.values()),
            dedup_key=call.idempotency_key,
        )


async def reset_budget(call: Call) -> BudgetReset:
    """Begin a new period: usage is 0, and what reservations hold stays held."""
    return await call.engine.reset_budget((await _own(call)).budget_id)


async def list_spend(call: Call) -> Page:
    """List the ledger of a budget: what was spent on which execution, by execution, period and dimension."""
    asked: ListSpend = call.query
    found = await call.engine.list_spend(
        (await _own(call)).budget_id, execution_id=asked.execution_id, cursor=asked.cursor, limit=asked.limit
    )
    return Page(items=found.items, next_cursor=found.next_cursor)


async def record_spend(call: Call) -> ReportAnswer:
    """Count usage in a budget, and enter it in its ledger under an execution.

    A repetition with the same `Idempotency-Key` within 24 hours is `already_applied` and counts nothing.
    """
    asked: RecordSpend = call.body
    found = await _own(call)
    await own_execution(call, asked.execution_id)
    with named(deltas="usage"):
        return await call.engine.record_spend(
            found.budget_id, asked.execution_id, asked.usage, idempotency_key=call.idempotency_key
        )


async def release_spend(call: Call) -> SpendReleased:
    """Take what the ledger has for an execution in this period off the usage, and delete its entries."""
    asked: ReleaseSpend = call.body
    found = await _own(call)
    await own_execution(call, asked.execution_id)
    await call.engine.release_budget(found.budget_id, asked.execution_id)
    return SpendReleased(budget_id=found.budget_id, execution_id=asked.execution_id)


async def read_usage(call: Call) -> Page:
    """Read what an execution, and what it submitted, used and hold of each budget, all periods together.

    Ordered by the ids of executions and budgets.
    """
    execution_id = call.path["execution_id"]
    if await call.engine.read_execution_state(execution_id) is None:
        raise NotFound("execution", execution_id)
    query: ReadUsage = call.query
    found = await call.engine.read_usage(
        execution_id,
        children=query.children,
        after=None if query.cursor is None else _place(query.cursor),
        limit=query.limit + 1,
    )
    items = found[: query.limit]
    own = await own_executions(call, {one.execution_id for one in items})
    rest = f"{items[-1].execution_id} {items[-1].budget_id}" if len(found) > query.limit else None
    return Page(items=[one for one in items if one.execution_id in own], next_cursor=rest)


def _place(cursor: str) -> tuple[ExecutionId, BudgetId]:
    """The execution and the budget after which a page begins."""
    execution_id, _, budget_id = cursor.partition(" ")
    return ExecutionId(parse_uuid(execution_id, "cursor")), BudgetId(parse_uuid(budget_id, "cursor"))


async def _own(call: Call) -> BudgetStatus:
    return await own_budget(call, call.path["budget_id"])


def _tag(found: BudgetStatus) -> str:
    return tag_of(found.defined_at, found)


OPERATIONS = (
    Operation(
        method="GET", path="/v1/budgets", handler=list_budgets, engine=("list_budgets", "find_budgets"),
        scope=Scope.READ, within=Within.GIVEN, query=ListBudgets, answers={200: list[BudgetStatus]}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/budgets", handler=create_budget, engine=("create_budget",), scope=Scope.OPERATE,
        within=Within.GIVEN, body=CreateBudget, answers={201: BudgetCreated, 200: BudgetExists}, repeats=Repeats.KEPT,
        made="/v1/budgets/{budget_id}",
    ),
    Operation(
        method="GET", path="/v1/budgets/{budget_id}", handler=get_budget,
        engine=("get_budget_status", "read_budget_usage_and_limits"), scope=Scope.READ, within=Within.ITEMS,
        answers={200: BudgetStatus}, etag=True,
    ),
    Operation(
        method="PATCH", path="/v1/budgets/{budget_id}", handler=update_budget, engine=("update_budget",),
        scope=Scope.OPERATE, within=Within.ITEMS, body=UpdateBudget, answers={200: BudgetStatus}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/budgets/{budget_id}/usage", handler=report_usage, engine=("report_usage_admin",),
        scope=Scope.OPERATE, within=Within.ITEMS, body=ReportUsage, answers={200: ReportAnswer}, repeats=Repeats.OWN,
    ),
    Operation(
        method="POST", path="/v1/budgets/{budget_id}/reset", handler=reset_budget, engine=("reset_budget",),
        scope=Scope.OPERATE, within=Within.ITEMS, answers={200: BudgetReset}, repeats=Repeats.KEPT,
    ),
    Operation(
        method="GET", path="/v1/budgets/{budget_id}/spend", handler=list_spend, engine=("list_spend",),
        scope=Scope.READ, within=Within.ITEMS, query=ListSpend, answers={200: list[SpendEntry]}, etag=True,
    ),
    Operation(
        method="POST", path="/v1/budgets/{budget_id}/spend", handler=record_spend, engine=("record_spend",),
        scope=Scope.OPERATE, within=Within.ITEMS, body=RecordSpend, answers={200: ReportAnswer}, repeats=Repeats.OWN,
    ),
    Operation(
        method="POST", path="/v1/budgets/{budget_id}/release", handler=release_spend, engine=("release_budget",),
        scope=Scope.OPERATE, within=Within.ITEMS, body=ReleaseSpend, answers={200: SpendReleased}, repeats=Repeats.KEPT,
    ),
    Operation(
        method="GET", path="/v1/executions/{execution_id}/usage", handler=read_usage, engine=("read_usage",),
        scope=Scope.READ, within=Within.EXECUTION, query=ReadUsage, answers={200: list[ExecutionUsage]}, etag=True,
    ),
)  # fmt: skip
