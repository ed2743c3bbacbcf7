"""Store the budgets and quotas that an app declares.

The database keeps a digest of each declaration that was stored. A declaration that did not change since is left alone,
so that a limit that an operator raised stays raised when a worker starts.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import timedelta
from uuid import UUID

import msgspec

from flowfabric.client.limits import LimitNames
from flowfabric.engine import Engine
from flowfabric.errors import InvalidInput, NotAllowed
from flowfabric.values.budget import BudgetCreated, budget_id_of
from flowfabric.values.quota import QuotaPolicyCreated, quota_policy_id_of
from flowfabric.values.spending import BudgetSpec, QuotaSpec

log = logging.getLogger("flowfabric.worker")


async def store_limits(engine: Engine, names: LimitNames) -> list[str]:
    """Store new and changed declarations; returns what was done, in words."""
    specs: dict[str, BudgetSpec | QuotaSpec] = {f"budget {one.name}": one for one in names.budgets.values()}
    specs.update({f"quota {one.name}": one for one in names.quotas.values()})
    if not specs:
        return []
    known = await engine.read_declared_limits(list(specs))
    digests = {title: _digest(spec) for title, spec in specs.items()}
    done: list[str] = []
    stored: dict[str, str] = {}
    for title, spec in specs.items():
        if known.get(title) == digests[title]:
            continue
        try:
            is_new = await (_store_budget(engine, spec) if isinstance(spec, BudgetSpec) else _store_quota(engine, spec))
            await _bind(engine, spec)
        except NotAllowed:
            log.warning("%s is declared differently from what is stored, and this role may not change it", title)
            continue
        stored[title] = digests[title]
        done.append(f"{title} {'created' if is_new else 'changed'}")
    if stored:
        await engine.note_declared_limits(stored)
    return done


def _digest(spec: BudgetSpec | QuotaSpec) -> str:
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).hexdigest()[:16]


async def _bind(engine: Engine, spec: BudgetSpec | QuotaSpec) -> None:
    """Store the declared bindings of a limit; remove those that are not declared any more."""
    limit: UUID = budget_id_of(spec.name) if isinstance(spec, BudgetSpec) else quota_policy_id_of(spec.name)
    for bind in spec.bind:
        await engine.bind_limit(limit, bind, is_declared=True)
    for one in (await engine.list_bindings(limit_id=limit, limit=1000)).items:
        if one.is_declared and one.bind not in spec.bind:
            await engine.unbind_limit(limit, one.bind)


async def _store_budget(engine: Engine, spec: BudgetSpec) -> bool:
    dimensions = sorted({*spec.hard, *spec.soft})
    made = await engine.create_budget(
        name=spec.name,
        enforcement_mode=spec.mode,
        reset_interval=spec.every or timedelta(0),
        dimensions=dimensions,
        hard_limits=[spec.hard.get(one, 0) for one in dimensions],
        soft_limits=[spec.soft.get(one, 0) for one in dimensions],
    )
    if isinstance(made, BudgetCreated):
        return True
    if made.budget_id != budget_id_of(spec.name):
        raise InvalidInput(
            f"the budget {spec.name!r} is stored with an id of its own: {made.budget_id}",
            field="name",
            allowed="a budget of another name",
        )
    before = await engine.get_budget_status(made.budget_id)
    await engine.update_budget(
        before.budget_id,
        # A dimension that is not declared any more has no limit.
        hard={**dict.fromkeys(before.hard_limits, 0), **spec.hard},
        soft={**dict.fromkeys(before.soft_limits, 0), **spec.soft},
        enforcement_mode=spec.mode,
        reset_interval=spec.every or timedelta(0),
    )
    return False


async def _store_quota(engine: Engine, spec: QuotaSpec) -> bool:
    made = await engine.create_quota_policy(
        name=spec.name,
        key=spec.key,
        window=spec.window,
        max_requests_per_window=spec.per_window,
        max_concurrent=spec.concurrent,
        jitter=spec.jitter,
    )
    if isinstance(made, QuotaPolicyCreated):
        return True
    before = await engine.get_quota_policy(made.quota_policy_id)
    if before is not None and before.key != spec.key:
        raise InvalidInput(
            f"the quota {spec.name!r} is stored with {f'the key {before.key!r}' if before.key else 'no key'}",
            field="key",
            allowed="the same key, or a quota of another name",
        )
    await engine.update_quota_policy(
        made.quota_policy_id,
        window=spec.window,
        max_requests_per_window=spec.per_window,
        max_concurrent=spec.concurrent,
        jitter=spec.jitter,
    )
    return False
