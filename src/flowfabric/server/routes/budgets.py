"""Budgets: what may be used, what is used, the ledger of what was spent."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal
from uuid import UUID

from msgspec import Struct, structs

from flowfabric.errors import Contention, InvalidInput, NotFound
from flowfabric.server.call import Answer, Call, Page
from flowfabric.server.namespaces import check_execution
from flowfabric.server.operation import Operation, Repeats, Scope, Within
from flowfabric.server.preconditions import etag_of, failed, wanted
from flowfabric.server.problems import Problem
from flowfabric.values.budget import (
    AlreadyApplied,
    BudgetCreated,
    BudgetExists,
    BudgetReset,
    BudgetStatus,
    ExecutionUsage,
    HardBreach,
    SoftBreach,
    SpendEntry,
    UsageOk,
    budget_id_of,
)
from flowfabric.values.ids import BudgetId, ExecutionId

Amounts = dict[str, int]
_NAMESPACE = "namespace"


class ListBudgets(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`namespace`: of this namespace only, which is the scope of a budget."""

    namespace: str | None = None
    scope_type: str | None = None
    scope_id: str | None = None
    exhausted: bool | None = None
    prefix: str | None = None
    cursor: str | None = None
    limit: int = 100


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
    raise_by: Amounts | None = None
    enforcement_mode: Literal["strict", "warn"] | None = None
    on_hard_limit: str | None = None
    on_soft_limit: str | None = None
    reset_interval_seconds: float | None = None


class ReportUsage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    usage: Amounts


class RecordSpend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    execution_id: UUID
    usage: Amounts


class ReleaseSpend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    execution_id: UUID


class ListSpend(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    execution_id: UUID | None = None
    cursor: str | None = None
    limit: int = 100


class ReadUsage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`children`: also what it submitted."""

    children: bool = True


class SpendReleased(Struct, frozen=True, kw_only=True):
    """The ledger has nothing of this execution in the current generation."""

    budget_id: BudgetId
    execution_id: ExecutionId


async def list_budgets(call: Call) -> Page:
    """List budgets by name, with what is used and held of each."""
    asked: ListBudgets = call.query
    scope_type, scope_id = asked.scope_type, asked.scope_id
    if call.namespace is not None:
        if scope_type not in (None, _NAMESPACE) or scope_id not in (None, call.namespace):
            return Page(items=())
        scope_type, scope_id = _NAMESPACE, call.namespace
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
    """Create a budget. One that exists is left as it is, also if its definition differs.

    A dimension is any name: `tokens`, `cost_micros`, `calls`. Without a `budget_id` the name decides it. The budgets of a
    namespace are those that keys of this namespace see and change.
    """
    asked: CreateBudget = call.body
    scope_type, scope_id = asked.scope_type, asked.scope_id
    if call.namespace is not None:
        if (scope_type, scope_id) not in (("", ""), (_NAMESPACE, call.namespace)):
            raise InvalidInput(
                f"got {scope_type} {scope_id}", field="scope_type", allowed=f"no scope, or namespace {call.namespace}"
            )
        scope_type, scope_id = _NAMESPACE, call.namespace
    if call.caller.namespaces is not None:
        await _refuse_foreign(call, asked)
    dimensions = list(dict.fromkeys((*asked.hard_limits, *asked.soft_limits)))
    found = await call.engine.create_budget(
        None if asked.budget_id is None else BudgetId(asked.budget_id),
        name=asked.name,
        scope_type=scope_type,
        scope_id=scope_id,
        enforcement_mode=asked.enforcement_mode,
        on_hard_limit=asked.on_hard_limit,
        on_soft_limit=asked.on_soft_limit,
        reset_interval=_span(asked.reset_interval_seconds) or timedelta(0),
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
        if not _is_own(call, found):
            raise Problem("conflict", "the name or id is taken", status=409)


async def get_budget(call: Call) -> Answer:
    """Read a budget: its limits, what is used and held, when it begins again."""
    found = await _own(call)
    return Answer(body=found, etag=_etag(found))


async def update_budget(call: Call) -> Answer:
    """Change a budget: raise or lower limits, its mode, its period. Usage stays, and executions that it held continue.

    A limit below the usage exhausts the budget. With `If-Match`, the `ETag` of the budget as it was read, nothing changes
    if its definition has changed since; usage may have.
    """
    asked: UpdateBudget = call.body
    found = await _own(call)
    if call.if_match is not None and not wanted(call.if_match, _etag(found), by=_definition):
        raise failed(_etag(found))
    try:
        changed = await call.engine.update_budget(
            found.budget_id,
            hard=asked.hard_limits,
            soft=asked.soft_limits,
            raise_by=asked.raise_by,
            enforcement_mode=asked.enforcement_mode,
            on_hard_limit=asked.on_hard_limit,
            on_soft_limit=asked.on_soft_limit,
            reset_interval=_span(asked.reset_interval_seconds),
            defined_at=None if call.if_match in (None, "*") else found.defined_at,
        )
    except Contention:
        raise failed(_etag(await _own(call))) from None
    return Answer(body=changed, etag=_etag(changed))
