"""Budgets and quotas for programs that are not workers, by name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from flowfabric.client.base import ClientBase
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.budget import BudgetExists, BudgetReset, BudgetStatus, ReportAnswer
from flowfabric.values.durations import Duration, duration
from flowfabric.values.ids import BudgetId, ExecutionId, QuotaPolicyId, parse_execution_id
from flowfabric.values.page import everything
from flowfabric.values.quota import QuotaPolicy, QuotaPolicyExists
from flowfabric.values.spending import (
    Mode,
    RunUsage,
    amounts_of,
    changes_of,
    check_limit_name,
    check_mode,
    limits_of,
    usage_of,
)


class Budgeting(ClientBase):
    """Creates, reads and changes budgets and quotas."""

    async def budgets(self, prefix: str = "", *, exhausted: bool | None = None) -> list[BudgetStatus]:
        """All budgets whose name begins with `prefix`, by name, with what is used, held and allowed.

        Those of single runs are among them: `owner_id` says whose.
        """
        return await everything(
            lambda after, size: self.engine.list_budgets(
                prefix=prefix or None, exhausted=exhausted, cursor=after, limit=size
            )
        )

    async def budget(self, name: str) -> BudgetStatus:
        """One budget by name; `NotFound` if there is none."""
        return await self.engine.get_budget_status(await self._budget_id(name))

    async def create_budget(
        self,
        name: str,
        *,
        hard: Mapping[str, int] | None = None,
        soft: Mapping[str, int] | None = None,
        every: Duration | None = None,
        mode: Mode = "strict",
    ) -> BudgetStatus:
        """Create a budget, as `app.budget` declares one. One of this name that exists is returned unchanged."""
        most, some = limits_of(hard, {}, "hard"), limits_of(soft, {}, "soft")
        dimensions = sorted({*most, *some})
        made = await self.engine.create_budget(
            name=check_limit_name(name),
            enforcement_mode=check_mode(mode),
            reset_interval=timedelta(0) if every is None else duration(every, "every"),
            dimensions=dimensions,
            hard_limits=[most.get(one, 0) for one in dimensions],
            soft_limits=[some.get(one, 0) for one in dimensions],
        )
        return await self.engine.get_budget_status(
            await self._budget_id(name) if isinstance(made, BudgetExists) else made.budget_id
        )

    async def raise_budget(
        self, name: str, amounts: Mapping[str, int] | None = None, /, **dimensions: int
    ) -> BudgetStatus:
        """Add to hard limits, or take away with a negative amount; executions that there is room for continue."""
        return await self.engine.update_budget(
            await self._budget_id(name), raise_by=changes_of(amounts, dimensions, "amounts")
        )

    async def set_budget(
        self,
        name: str,
        *,
        hard: Mapping[str, int] | None = None,
        soft: Mapping[str, int] | None = None,
        every: Duration | None = None,
        mode: Mode | None = None,
    ) -> BudgetStatus:
        """Set limits (0: none) and leave the others as they are. `every=0` ends periodic resets."""
        return await self.engine.update_budget(
            await self._budget_id(name),
            hard=None if hard is None else amounts_of(hard, {}, "hard"),
            soft=None if soft is None else amounts_of(soft, {}, "soft"),
            enforcement_mode=None if mode is None else check_mode(mode),
            reset_interval=None if every is None else duration(every, "every"),
        )

    async def reset_budget(self, name: str) -> BudgetReset:
        """Begin a new period now: usage is 0, and what is held stays held."""
        return await self.engine.reset_budget(await self._budget_id(name))

    async def record_spend(
        self,
        name: str,
        execution_id: str | ExecutionId,
        amounts: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
    ) -> ReportAnswer:
        """Count what an execution cost, without a lease, and enter it in the ledger: `release_budget` takes it back."""
        return await self.engine.record_spend(
            await self._budget_id(name),
            parse_execution_id(execution_id),
            amounts_of(amounts, {}, "amounts"),
            idempotency_key=idempotency_key,
        )

    async def release_budget(self, name: str, execution_id: str | ExecutionId) -> None:
        """Take what the ledger has for an execution in this period off the usage."""
        await self.engine.release_budget(await self._budget_id(name), parse_execution_id(execution_id))

    async def usage(self, execution_id: str | ExecutionId) -> RunUsage:
        """Return what an execution and all that it submitted used and hold: in all, by budget and by execution."""
        return usage_of(await self.engine.read_usage(parse_execution_id(execution_id)))

    async def quotas(self, prefix: str = "") -> list[QuotaPolicy]:
        """All quotas whose name begins with `prefix`, by name, with how full they are and how many wait."""
        found = await everything(
            lambda after, size: self.engine.list_quota_policies(name_prefix=prefix or None, cursor=after, limit=size)
        )
        return sorted(found, key=lambda one: (one.name is None, one.name or str(one.quota_policy_id)))

    async def quota(self, name: str) -> QuotaPolicy:
        """One quota by name; `NotFound` if there is none."""
        found = await self.engine.get_quota_policy(name=check_limit_name(name))
        if found is None:
            raise NotFound("quota", name)
        return found

    async def create_quota(
        self,
        name: str,
        *,
        concurrent: int = 0,
        per_window: int = 0,
        window: Duration = 60,
        key: str | None = None,
        jitter: Duration = 0,
    ) -> QuotaPolicy:
        """Create a quota, as `app.quota` declares one. One of this name that exists is returned unchanged."""
        made = await self.engine.create_quota_policy(
            name=check_limit_name(name),
            key=key,
            window=duration(window, "window"),
            max_requests_per_window=per_window,
            max_concurrent=concurrent,
            jitter=duration(jitter, "jitter"),
        )
        if isinstance(made, QuotaPolicyExists):
            return await self.quota(name)
        return await self._policy(made.quota_policy_id)

    async def set_quota(
        self,
        name: str,
        *,
        concurrent: int | None = None,
        per_window: int | None = None,
        window: Duration | None = None,
        jitter: Duration | None = None,
    ) -> QuotaPolicy:
        """Change numbers of a quota (0: no such limit); executions that there is room for become claimable."""
        if concurrent is None and per_window is None and window is None and jitter is None:
            raise InvalidInput("nothing is given", field="concurrent", allowed="concurrent, per_window, window, jitter")
        target = (await self.quota(name)).quota_policy_id
        await self.engine.update_quota_policy(
            target,
            window=None if window is None else duration(window, "window"),
            max_requests_per_window=per_window,
            max_concurrent=concurrent,
            jitter=None if jitter is None else duration(jitter, "jitter"),
        )
        return await self._policy(target)

    async def _policy(self, quota_policy_id: QuotaPolicyId) -> QuotaPolicy:
        found = await self.engine.get_quota_policy(quota_policy_id)
        if found is None:
            raise NotFound("quota", quota_policy_id)
        return found

    async def _budget_id(self, name: str) -> BudgetId:
        found = await self.engine.find_budgets([check_limit_name(name)])
        if name not in found:
            raise NotFound("budget", name)
        return found[name]
