"""Budgets and quotas as tasks and submitters use them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import flowfabric as ff
from flowfabric import middleware as ff_middleware
from flowfabric.testing import Kit
from flowfabric.values.budget import BudgetStatus, SoftBreach, budget_id_of
from flowfabric.values.ids import BudgetId, QuotaPolicyId, mint_execution_id, mint_uuid
from flowfabric.values.quota import quota_policy_id_of
from tests.each import each
from tests.support import WORKER

PATIENCE = 60.0


def _nothing() -> None: ...


async def status(app: ff.App, name: str) -> BudgetStatus:
    return await (await app.client()).engine.get_budget_status(budget_id_of(name))


async def used(app: ff.App, name: str = "team") -> tuple[dict[str, int], dict[str, int]]:
    """What is used of a budget, and what is held."""
    found = await status(app, name)
    return found.usage, {name: amount for name, amount in found.held.items() if amount}


# ---- bindings


async def test_declared_bindings_are_stored_changed_and_removed_with_their_declaration(kit: Kit) -> None:
    engine = await kit.engine()

    async def bound(*scopes: ff.Bind) -> list[tuple[str | None, str, bool]]:
        app = ff.App()
        kit.use(app)
        app.budget("team", hard={"tokens": 10}, bind=scopes[0] if len(scopes) == 1 else scopes)
        app.quota("slots", concurrent=2, bind=ff.Bind(kind="agent"))
        await app.prepare()
        found = (await engine.list_bindings()).items
        return sorted((one.name, str(one.bind), one.is_declared) for one in found)

    quota = ("slots", "kind agent", True)
    first = await bound(ff.Bind(lane="gpu"))
    assert first == [quota, ("team", "lane gpu", True)]
    await engine.bind_limit(budget_id_of("team"), ff.Bind(namespace="eu"))
    operators = ("team", "namespace eu", False)
    second = await bound(ff.Bind(lane="gpu", tag=("plan", "free")), ff.Bind(flow="nightly"))
    assert second == [
        quota, ("team", "flow nightly", True), ("team", "lane gpu, tag plan=free", True), operators,
    ]  # fmt: skip
    await engine.unbind_limit(budget_id_of("team"), ff.Bind(flow="nightly"))
    again = await bound(ff.Bind(lane="gpu", tag=("plan", "free")), ff.Bind(flow="nightly"))
    assert again == [quota, ("team", "lane gpu, tag plan=free", True), operators], "it did not change"
    assert await bound() == [quota, operators]


async def test_a_bound_limit_that_is_not_stored_yet_holds_for_what_its_app_submits(database: str) -> None:
    def declared() -> tuple[ff.App, ff.Task[[], None], ff.Task[[], None]]:
        app = ff.App(database)
        app.budget("free", hard={"tokens": 5}, bind=ff.Bind(tag=("plan", "free")))
        app.quota("gpus", concurrent=1, bind=[ff.Bind(lane="gpu"), ff.Bind(flow="nightly", namespace="eu")])
        app.quota("keyed", concurrent=1, key="tenant", bind=ff.Bind(kind="metered"))

        @app.task
        async def agent() -> None: ...

        @app.task
        async def metered() -> None: ...

        return app, agent, metered

    free = {"tags": {"plan": "free"}, "lane": "gpu"}

    async def submitted(app: ff.App, agent: ff.Task[[], None]) -> list[tuple[int, int]]:
        """How many budgets and quotas each has."""
        flow = app.flow("nightly")
        flow.add(agent, name="a", namespace="eu")
        flow.add(agent, name="b", **free)  # type: ignore[call-overload]  # options
        nodes = (await flow.submit()).nodes
        runs = [
            await agent.submit(),
            await agent.options(**free).submit(),  # type: ignore[arg-type]  # options
            *await agent.submit_many([()], **free),  # type: ignore[arg-type]  # options
        ]
        engine = (await app.client()).engine
        found = [await engine.read_execution(one) for one in (*(run.execution_id for run in runs), *nodes.values())]
        return [(len(one.budget_ids), len(one.quota_policy_ids)) for one in found if one is not None]

    app, agent, metered = declared()
    async with app:
        assert await submitted(app, agent) == [(0, 0), (1, 1), (1, 1), (0, 1), (1, 1)]
        with pytest.raises(ff.InvalidInput, match=r"'keyed' is declared but not stored.*await app.prepare\(\)"):
            await metered.submit()
        await app.prepare()
        await metered.submit()
        assert await submitted(app, agent) == [(0, 0), (1, 1), (1, 1), (0, 1), (1, 1)]
        engine = (await app.client()).engine
        await engine.unbind_limit(budget_id_of("free"), ff.Bind(tag=("plan", "free")))
        assert await submitted(app, agent) == [(0, 0), (0, 1), (0, 1), (0, 1), (0, 1)]
    app, agent, _ = declared()
    async with app:
        assert await submitted(app, agent) == [(0, 0), (0, 1), (0, 1), (0, 1), (0, 1)], "operators decide"


async def test_a_bound_budget_counts_what_a_task_uses_that_does_not_name_it(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 1000}, bind=ff.Bind(kind="agent"))

    @kit_app.task(name="agent")
    async def agent(ctx: ff.Context) -> int:
        return (await ctx.usage(tokens=100)).remaining["tokens"]

    await kit_app.prepare()
    assert await kit.run_inline(agent) == 900
    assert await used(kit_app) == ({"tokens": 100}, {})


@pytest.mark.parametrize("bind", [5, "lane", {"lane": "a"}, [5], [ff.Bind(lane="a"), None]])
def test_a_declaration_is_bound_to_scopes_only(bind: Any) -> None:
    app = ff.App()
    for declare in (
        lambda: app.budget("b", hard={"t": 1}, bind=bind),
        lambda: app.quota("q", concurrent=1, bind=bind),
    ):
        with pytest.raises(ff.errors.InvalidInput) as refused:
            declare()
        assert refused.value.field == "bind"


# ---- reports


async def test_usage_is_counted_once_however_often_the_handler_runs(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 1000})

    @kit_app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> list[int]:
        first = await ctx.usage(tokens=100)
        await ctx.sleep("1h")
        second = await ctx.usage(tokens=50, cost=3)
        return [first.remaining["tokens"], second.remaining["tokens"]]

    assert await kit.run_inline(agent) == [900, 850]
    assert await used(kit_app) == ({"tokens": 150, "cost": 3}, {})


async def test_usage_is_counted_once_wherever_the_worker_dies(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 100_000})
    answers: list[int] = []

    @kit_app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> int:
        await ctx.usage(tokens=1)
        await ctx.step("work", lambda: 1)
        async with ctx.spend(tokens=20) as spend:
            spend.settle(tokens=10)
        await ctx.usage(tokens=100)
        answers.append((await status(kit_app, "team")).usage["tokens"])
        return 0

    report = await kit.crash_everywhere(agent)
    runs = answers[-1] // 111
    assert answers[-1] == 111 * runs, "every execution counted 111, whatever happened to its worker"
    assert report.result == 0
    assert (await used(kit_app))[1] == {}


async def test_usage_in_a_step_counts_each_time_the_step_runs(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 1000})

    @kit_app.task(budgets=["team"], retry=ff.RetryPolicy(max_retries=2, backoff=ff.Fixed(0)))
    async def agent(ctx: ff.Context) -> int:
        async def ask() -> int:
            await ctx.usage(tokens=100)
            async with ctx.spend(tokens=50) as spend:
                spend.settle(tokens=40)
            if ctx.retry_count < 2:
                raise ConnectionError("again")
            return 1

        return await ctx.step("ask", ask)

    assert await kit.run_inline(agent) == 1
    assert await used(kit_app) == ({"tokens": 420}, {})


async def test_only_named_budgets_count_it(kit: Kit, kit_app: ff.App) -> None:
    for name in ("team", "tenant"):
        kit_app.budget(name, hard={"tokens": 1000})

    @kit_app.task(budgets=["team", "tenant"])
    async def agent(ctx: ff.Context) -> int:
        await ctx.usage(tokens=5)
        await ctx.usage({"tokens": 7, "name": 1}, budgets=["tenant"])
        with pytest.raises(ff.InvalidInput, match="there is no budget 'tenat'; did you mean 'tenant'"):
            await ctx.usage(tokens=1, budgets=["tenat"])
        return 1

    await kit.run_inline(agent)
    assert await used(kit_app, "team") == ({"tokens": 5}, {})
    assert await used(kit_app, "tenant") == ({"tokens": 12, "name": 1}, {})


async def test_a_synchronous_handler_reports_and_holds(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 1000})

    @kit_app.task(budgets=["team"])
    def agent(ctx: ff.SyncContext) -> dict[str, int]:
        with ctx.spend(tokens=500) as spend:
            spend.settle(tokens=ctx.step("ask", lambda: 120))
        assert spend.used is not None
        assert spend.used.remaining == {"tokens": 880}
        ctx.sleep("1h")
        return ctx.usage(tokens=80).remaining

    assert await kit.run_inline(agent) == {"tokens": 800}
    assert await used(kit_app) == ({"tokens": 200}, {})


# ---- amounts that are held


async def test_a_task_without_a_budget_holds_and_counts_nothing(kit: Kit, kit_app: ff.App) -> None:
    @kit_app.task
    async def agent(ctx: ff.Context) -> list[object]:
        async with ctx.spend(tokens=400) as spend:
            held = spend.held
            spend.settle(tokens=120)
        async with ctx.spend(tokens=400) as other:
            pass  # given back
        await ctx.sleep("1h")
        assert spend.used is not None
        return [held, spend.used.remaining, other.used, (await ctx.usage(tokens=1)).remaining]

    @kit_app.task
    def synchronous(ctx: ff.SyncContext) -> list[object]:
        with ctx.spend(tokens=400) as spend:
            spend.settle(tokens=120)
        return [spend.held, spend.is_settled]

    assert await kit.run_inline(agent) == [{}, {}, None, {}]
    assert await kit.run_inline(synchronous) == [{}, False]


async def test_amounts_are_held_while_the_block_runs_and_given_back_without_a_settlement(
    kit: Kit, kit_app: ff.App
) -> None:
    kit_app.budget("team", hard={"tokens": 1000})
    seen: list[Any] = []

    @kit_app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> None:
        async with ctx.spend(tokens=600) as spend:
            seen.append(await used(kit_app))
        assert spend.used is None
        seen.append(await used(kit_app))
        for error in (ValueError("the call failed"), asyncio.CancelledError("the handler's own")):
            try:
                async with ctx.spend(tokens=600):
                    raise error
            except (ValueError, asyncio.CancelledError):
                seen.append(await used(kit_app))
        try:
            async with ctx.spend(tokens=600) as spend:
                spend.settle(tokens=70)
                raise ValueError("after the call")
        except ValueError:
            assert spend.used is not None
            seen.append(await used(kit_app))

    await kit.run_inline(agent)
    assert seen == [
        ({}, {"tokens": 600}), ({}, {}), ({}, {}), ({}, {}), ({"tokens": 70}, {}),
    ]  # fmt: skip


async def test_a_settlement_outside_of_its_block_is_refused(app: ff.App) -> None:
    app.budget("team", hard={"tokens": 100})

    @app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> int:
        spend = ctx.spend(tokens=50)
        for _ in range(2):
            with pytest.raises(ff.InvalidInput, match="settle: outside of its block"):
                spend.settle(tokens=10)
            async with spend:
                spend.settle(tokens=20)
        return 1

    @app.task(budgets=["team"])
    def plain(ctx: ff.SyncContext) -> int:
        with ctx.spend(tokens=50) as spend:
            spend.settle(tokens=5)
        with pytest.raises(ff.InvalidInput, match="settle: outside of its block"):
            spend.settle(tokens=10)
        return 1

    async with ff.Worker(app):
        await (await agent.submit()).result()
        await (await plain.submit()).result()
    assert await used(app) == ({"tokens": 45}, {})


async def test_a_settlement_above_what_fits_is_an_overrun_and_stops_nothing(
    kit: Kit, kit_app: ff.App, caplog: pytest.LogCaptureFixture
) -> None:
    kit_app.budget("team", hard={"tokens": 100})

    @kit_app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> int:
        async with ctx.spend(tokens=50) as spend:
            spend.settle(tokens=130)
        assert spend.used is not None
        return spend.used.overrun

    assert await kit.run_inline(agent) == 30
    found = await status(kit_app, "team")
    assert (found.usage, found.overrun) == ({"tokens": 100}, {"tokens": 30})
    assert "used 30 tokens more than budget team allows" in caplog.text


# ---- breaches


async def test_a_breach_is_raised_with_all_its_numbers_and_the_same_in_later_runs(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 100})
    runs: list[str] = []

    @kit_app.task(budgets=["team"], on_budget="raise")
    async def agent(ctx: ff.Context) -> str:
        await ctx.usage(tokens=60)
        async with ctx.spend(tokens=10):
            try:
                await ctx.usage(tokens=41)
            except ff.BudgetExceeded as error:
                runs.append(str(error))
                assert (error.budget, error.dimension, error.used, error.held, error.limit, error.asked) == (
                    "team", "tokens", 60, 10, 100, 41,
                )  # fmt: skip
        # A later run takes the same branch, also if there is room by then.
        await (await kit_app.client()).engine.update_budget(budget_id_of("team"), hard={"tokens": 1000})
        await ctx.step("cheaper", lambda: 1)
        await ctx.sleep("1h")
        return "done"

    assert await kit.run_inline(agent) == "done"
    words = "budget_hard_breach: tokens of budget 'team': 41 asked for, 60 used and 10 held of 100"
    assert runs == [words, words]
    assert await used(kit_app) == ({"tokens": 60}, {})


async def test_a_retry_asks_again_for_what_did_not_fit(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 100})

    @kit_app.task(budgets=["team"], on_budget="raise", retry=ff.RetryPolicy(max_retries=1, backoff=ff.Fixed(0)))
    async def agent(ctx: ff.Context) -> int:
        if ctx.retry_count:
            await (await kit_app.client()).engine.update_budget(budget_id_of("team"), hard={"tokens": 1000})
        return (await ctx.usage(tokens=500)).remaining["tokens"]

    assert await kit.run_inline(agent) == 500
    assert await used(kit_app) == ({"tokens": 500}, {})


@pytest.mark.parametrize("catches", [False, True])
async def test_a_task_that_fails_for_its_budget_fails_for_good(kit: Kit, kit_app: ff.App, catches: bool) -> None:
    kit_app.budget("team", hard={"tokens": 100})

    @kit_app.task(budgets=["team"], on_budget="fail", retry=ff.RetryPolicy(max_retries=5, backoff=ff.Fixed(0)))
    async def agent(ctx: ff.Context) -> None:
        try:
            await ctx.usage(tokens=101)
        except Exception:
            if not catches:
                raise

    run = await agent.submit()
    with pytest.raises(ff.TaskFailed, match="101 asked for, 0 used of 100"):
        await kit.run_until_ended(run)
    assert len(await run.attempts()) == 1
    assert (await run.outcome()).failure_category == "budget_hard_breach"


async def test_a_soft_limit_is_reported_and_stops_nothing(kit: Kit, kit_app: ff.App) -> None:
    told: list[Any] = []

    class Alarm(ff_middleware.Middleware):
        def soft_limit(self, task: Any, breach: SoftBreach) -> None:
            told.append((task.kind, breach.dimension, breach.current_usage, breach.soft_limit))
            raise ValueError("a hook that fails stops nothing either")

    kit_app.middleware = (Alarm(),)
    kit_app.budget("team", hard={"tokens": 100}, soft={"tokens": 10})

    @kit_app.task(budgets=["team"])
    async def agent(ctx: ff.Context) -> list[bool]:
        first = await ctx.usage(tokens=10)
        second = await ctx.usage(tokens=1)
        async with ctx.spend(tokens=5) as spend:
            spend.settle(tokens=5)
        assert spend.used is not None
        return [one.soft_breach is not None for one in (first, second, spend.used)]

    assert await kit.run_inline(agent) == [False, True, True]
    assert told == [("agent", "tokens", 11, 10), ("agent", "tokens", 16, 10)]


# ---- names


@each(
    ("given", "words"),
    [
        ({"budgets": ["resaerch"]}, "budgets: there is no budget 'resaerch'; did you mean 'research'"),
        ({"quotas": ["api"]}, "quotas: there is no quota 'api'"),
        ({"budgets": "research"}, "budgets: got 'research'; allowed: a list of names"),
        ({"budgets": [""]}, "budgets: empty"),
        ({"quotas": [5]}, "quotas: not text: 5"),
        ({"quotas": ["keyed"]}, "tags: the quota 'keyed' counts per value of the tag 'tenant', which is missing"),
        ({"budget": 5}, "budget: got int; allowed: an ff.Budget or None"),
    ],
)
async def test_a_wrong_limit_is_refused_before_anything_is_stored(app: ff.App, given: Any, words: str) -> None:
    app.budget("research", hard={"tokens": 5})
    app.quota("keyed", concurrent=1, key="tenant")

    @app.task
    async def agent() -> None: ...

    flow = app.flow("whole")
    with pytest.raises(ff.InvalidInput) as refused:
        await agent.options(**given).submit()
    assert words in str(refused.value)
    with pytest.raises(ff.InvalidInput):
        await agent.submit_many([()], **given)
    with pytest.raises(ff.InvalidInput):
        flow.add(agent, **given)
        await flow.submit()
    assert (await (await app.client()).find()).items == []


async def test_a_keyed_quota_that_is_not_stored_yet_is_refused_until_it_is(app: ff.App) -> None:
    """It would count by no key, for good."""
    app.quota("keyed", concurrent=1, key="tenant")
    app.quota("plain", concurrent=3)

    @app.task(quotas=["keyed", "plain"], tags={"tenant": "acme"})
    async def agent() -> None: ...

    flow = app.flow("whole")
    flow.add(agent)
    for submit in (agent.submit, lambda: agent.submit_many([()]), flow.submit):
        with pytest.raises(ff.InvalidInput, match=r"'keyed' is declared but not stored.*await app.prepare\(\)"):
            await submit()
    await agent.options(quotas=["plain"]).submit()  # holds as soon as it is stored
    await app.prepare()
    for run in (await agent.submit(), *await agent.submit_many([()])):
        assert await run.get() is not None
    engine = (await app.client()).engine
    assert await engine.claim(**WORKER) is not None
    assert await engine.claim(**WORKER) is not None
    keys = (await engine.list_quota_keys(quota_policy_id_of("keyed"))).items
    assert [one.key for one in keys] == ["acme"]


async def test_a_budget_that_was_created_elsewhere_can_be_named(app: ff.App) -> None:
    engine = (await app.client()).engine
    await engine.create_budget(name="theirs", dimensions=["tokens"], hard_limits=[5], soft_limits=[0])
    await engine.create_quota_policy(name="api", key="tenant", max_concurrent=1)

    @app.task(budgets=["theirs"], quotas=["api"])
    async def agent() -> None: ...

    with pytest.raises(ff.InvalidInput, match="counts per value of the tag 'tenant'"):
        await agent.submit()
    found = await (await agent.options(tags={"tenant": "acme"}).submit()).get()
    assert found.budget_ids == (budget_id_of("theirs"),)
    assert found.quota_policy_ids == (quota_policy_id_of("api"),)


# ---- declarations


async def test_a_declaration_that_did_not_change_leaves_what_an_operator_set(database: str) -> None:
    def declared(**limits: int) -> ff.App:
        app = ff.App(database)
        app.budget("team", hard=limits, soft={"tokens": 1}, every="1 day")
        app.quota("api", concurrent=limits["tokens"], per_window=5, window="10s", jitter=1)
        return app

    async with declared(tokens=100) as app:
        engine = (await app.client()).engine
        assert await app.prepare() == ["budget team created", "quota api created"]
        await engine.update_budget(budget_id_of("team"), raise_by={"tokens": 50})
        await engine.update_quota_policy(quota_policy_id_of("api"), max_concurrent=3)
        assert await app.prepare() == []
        found = await status(app, "team")
        assert found.hard_limits == {"tokens": 150}
        ends = found.next_reset_at
    async with declared(tokens=200, cost=3) as app:
        engine = (await app.client()).engine
        assert await app.prepare() == ["budget team changed", "quota api changed"]
        found = await status(app, "team")
        assert (found.hard_limits, found.next_reset_at) == ({"tokens": 200, "cost": 3}, ends)
        policy = await engine.get_quota_policy(name="api")
        assert policy is not None
        assert policy.limits.active_concurrency_cap == 200
    async with declared(tokens=200) as app:
        await app.prepare()
        assert (await status(app, "team")).hard_limits == {"tokens": 200, "cost": 0}, (
            "a limit that is not declared any more"
        )


async def test_a_declared_name_that_another_budget_or_quota_has_is_refused(app: ff.App) -> None:
    engine = (await app.client()).engine
    await engine.create_budget(BudgetId(mint_uuid()), name="team")
    app.budget("team", hard={"tokens": 1})
    with pytest.raises(ff.InvalidInput, match="the budget 'team' is stored with an id of its own"):
        await app.prepare()
    await engine.create_quota_policy(QuotaPolicyId(mint_uuid()), name="api", max_concurrent=1)
    other = ff.App(app.dsn)
    other.quota("api", concurrent=1)
    async with other:
        with pytest.raises(ff.InvalidInput, match="'api' is the name of another policy"):
            await other.prepare()


async def test_a_worker_stores_what_its_app_declares(app: ff.App) -> None:
    app.budget("team", hard={"tokens": 5}, mode="warn")
    async with ff.Worker(app, duties=False):
        assert (await status(app, "team")).enforcement_mode == "warn"


@each(
    ("declare", "words"),
    [
        (lambda app: app.quota("q"), "concurrent: neither is given"),
        (lambda app: app.budget("b", hard={"tokens": 0}), "tokens: got 0; allowed: an integer from 1"),
        (lambda app: app.budget("b", hard={"tokens": 1.5}), "tokens: got 1.5"),
        (lambda app: app.budget("b", hard={"tokens": True}), "tokens: got True"),
        (lambda app: app.budget("b", soft={"tokens": 2**63}), "tokens: got 9223372036854775808"),
        (lambda app: app.budget("b", hard={"a\n": 1}), "hard: got 'a\\n'"),
        (lambda app: app.budget("b", mode="soft"), "mode: got 'soft'; allowed: strict, warn"),
        (lambda app: app.budget("b", every=0), "every: got 0"),
        (lambda app: app.budget(""), "name: empty"),
        (lambda app: app.quota("q", per_window=1, window=0.5), "window: got 0.5"),
        (lambda app: app.quota("q", per_window=1, jitter=-1), "jitter: got -1"),
        (lambda app: app.quota("q", concurrent=10**10), "concurrent: got 10000000000"),
        (lambda app: (app.budget("b"), app.budget("b", hard={"a": 1})), "'b' is declared twice"),
        (lambda app: app.task(on_budget="stop")(_nothing), "on_budget: got 'stop'; allowed: pause, raise, fail"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_written(declare: Any, words: str) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        declare(ff.App())
    assert words in str(refused.value)


# ---- clients


async def test_a_client_creates_reads_and_changes_budgets_and_quotas(app: ff.App) -> None:
    client = await app.client()
    made = await client.create_budget("team", hard={"tokens": 100}, soft={"tokens": 50}, every="1 day")
    assert (made.hard_limits, made.soft_limits) == ({"tokens": 100}, {"tokens": 50})
    again = await client.create_budget("team", hard={"tokens": 5})
    assert again.hard_limits == {"tokens": 100}
    assert (await client.raise_budget("team", tokens=50)).hard_limits == {"tokens": 150}
    assert (await client.raise_budget("team", {"tokens": -20})).hard_limits == {"tokens": 130}
    changed = await client.set_budget("team", soft={"tokens": 0}, hard={"cost": 3}, mode="warn", every=0)
    assert (changed.hard_limits, changed.enforcement_mode) == ({"tokens": 130, "cost": 3}, "warn")
    assert changed.reset_interval is None
    execution = mint_execution_id(count=256)
    await client.record_spend("team", execution, {"tokens": 30})
    assert (await client.budget("team")).usage == {"tokens": 30}
    await client.release_budget("team", execution)
    await client.reset_budget("team")
    await client.create_budget("other")
    assert [one.name for one in await client.budgets()] == ["other", "team"]
    assert [one.name for one in await client.budgets("te")] == ["team"]

    quota = await client.create_quota("api", concurrent=2, per_window=10, window="10s", key="tenant")
    assert (quota.limits.active_concurrency_cap, quota.key) == (2, "tenant")
    assert (await client.create_quota("api", concurrent=9)).limits.active_concurrency_cap == 2
    assert (await client.set_quota("api", concurrent=3)).limits.active_concurrency_cap == 3
    assert [one.name for one in await client.quotas()] == ["api"]
    for call in (
        client.budget("x"), client.raise_budget("x", tokens=1), client.reset_budget("x"), client.quota("x"),
        client.set_quota("x", concurrent=1), client.set_budget("x", mode="warn"),
    ):  # fmt: skip
        with pytest.raises(ff.NotFound, match=r"not found: (budget|quota) x"):
            await call
    for wrong in ({"tokens": 1.5}, {"tokens": True}, {"tokens": 2**63}, {}, {"": 1}):
        with pytest.raises(ff.InvalidInput):
            await client.raise_budget("team", wrong)  # type: ignore[arg-type]  # the refusals under test


def test_the_sync_client_has_the_same(database: str) -> None:
    with ff.Client(ff.App(database)) as client:
        client.create_budget("team", hard={"tokens": 100})
        assert client.raise_budget("team", tokens=50).hard_limits == {"tokens": 150}
        assert client.create_quota("api", concurrent=1).name == "api"


async def test_the_usage_of_a_run_is_listed_by_dimension_budget_and_execution(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 1000})
    kit_app.budget("tenant", hard={"tokens": 1000})

    @kit_app.task(budgets=["team"])
    async def child(ctx: ff.Context, tokens: int) -> None:
        await ctx.usage(tokens=tokens)

    @kit_app.task(budgets=["team", "tenant"])
    async def parent(ctx: ff.Context) -> list[str]:
        await ctx.usage(tokens=100, calls=1)
        runs = [await child.submit(n) for n in (10, 20)]
        for run in runs:
            await run.result()
        return [run.id for run in runs]

    run = await parent.submit()
    first, second = await kit.run_until_ended(run)
    found = await run.usage()
    assert found.by_budget["team"] == {"tokens": 130, "calls": 1}
    assert {str(one): amounts for one, amounts in found.by_execution.items()} == {
        run.id: {"tokens": 100, "calls": 1}, first: {"tokens": 10}, second: {"tokens": 20},
    }  # fmt: skip
    assert found.total == {"tokens": 130, "calls": 1}
    assert await run.budget() is None
    with pytest.raises(ff.NotFound, match="was submitted without a budget of its own"):
        await run.raise_budget(tokens=1)


async def test_the_usage_of_a_flow_is_listed_by_node_too(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 1000})

    @kit_app.task
    async def child(ctx: ff.Context, tokens: int) -> None:
        await ctx.usage(tokens=tokens)

    @kit_app.task(budgets=["team"])
    async def node(ctx: ff.Context, tokens: int) -> None:
        await ctx.usage(tokens=tokens)
        await (await child.submit(tokens // 10)).result()

    @kit_app.task
    async def idle() -> None: ...

    flow = kit_app.flow("whole")
    for name, tokens in (("first", 10), ("second", 20)):
        flow.add(node, tokens, name=name)
    flow.add(idle, name="idle")
    run = await flow.submit()
    await kit.run_until_ended(run)
    found = await (await kit_app.client()).flow(run.id).usage()
    assert found == await run.usage()
    assert found.by_node == {"first": {"tokens": 10}, "second": {"tokens": 20}}
    assert found.by_budget == {"team": {"tokens": 33}}
    assert found.total == {"tokens": 33}
    assert sorted(amounts["tokens"] for amounts in found.by_execution.values()) == [1, 2, 10, 20]


# ---- the kit, hooks, schedules


async def test_the_kit_moves_the_clock_to_the_room_in_a_window_and_to_the_reset_of_a_budget(
    kit: Kit, kit_app: ff.App
) -> None:
    kit_app.quota("slow", per_window=1, window="1h")
    kit_app.budget("daily", hard={"tokens": 10}, every="1 day")

    @kit_app.task(quotas=["slow"])
    async def call(n: int) -> int:
        return n

    @kit_app.task(budgets=["daily"])
    async def agent(ctx: ff.Context) -> int:
        return (await ctx.usage(tokens=10)).remaining["tokens"]

    begun = await kit.clock.now()
    runs = [await call.submit(n) for n in range(3)]
    assert [await kit.run_until_ended(run) for run in runs] == [0, 1, 2]
    assert timedelta(hours=2) <= await kit.clock.now() - begun < timedelta(hours=3)
    for _ in range(2):
        assert await kit.run_inline(agent) == 0
    assert await kit.clock.now() - begun >= timedelta(days=1)


async def test_the_task_of_a_hook_has_its_own_limits(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("alarms", hard={"mails": 5})
    kit_app.quota("mails", concurrent=1)
    told: list[ff.ExecutionId] = []

    await (await kit_app.client()).create_budget("elsewhere", hard={"mails": 5})

    @kit_app.task(budgets=["alarms", "elsewhere"], quotas=["mails"], budget=ff.Budget(mails=2))
    async def tell(ctx: ff.Context, failure: ff.Failure) -> None:
        told.append(ctx.execution_id)
        await ctx.usage(mails=1)

    @kit_app.task(on_failure=tell)
    async def fragile() -> None:
        raise ValueError("no")

    with pytest.raises(ff.TaskFailed):
        await kit.run_inline(fragile)
    await kit.run_all()
    assert (await used(kit_app, "alarms"))[0] == {"mails": 1}
    found = await (await kit_app.client()).get(told[0])
    assert set(found.budget_ids) == {budget_id_of("alarms"), budget_id_of("elsewhere"), told[0]}
    assert found.quota_policy_ids == (quota_policy_id_of("mails"),)


async def test_what_a_schedule_submits_has_its_limits(kit: Kit, kit_app: ff.App) -> None:
    kit_app.budget("team", hard={"tokens": 100})
    left: list[dict[str, int]] = []

    @kit_app.task
    async def agent(ctx: ff.Context) -> None:
        left.append((await ctx.usage(tokens=30)).remaining)

    kit_app.schedule(agent.options(budgets=["team"], budget=ff.Budget(tokens=40)), every="1h")
    await kit.run_all()
    for _ in range(2):
        await kit.clock.advance(hours=1)
        await kit.run_all()
    assert left == [{"tokens": 10}, {"tokens": 10}]
    assert (await used(kit_app))[0] == {"tokens": 60}


async def test_a_schedule_with_an_unknown_limit_is_refused_before_it_is_stored(app: ff.App) -> None:
    @app.task(budgets=["nothing"])
    async def agent() -> None: ...

    app.schedule(agent, every="1h")
    with pytest.raises(ff.InvalidInput, match="there is no budget 'nothing'"):
        async with ff.Worker(app):
            pass
    assert await (await app.client()).schedules() == []


async def test_handlers_that_run_at_the_same_time_share_round_trips_and_never_use_more_than_the_limit(
    database: str,
) -> None:
    class Counting(ff_middleware.Middleware):
        calls = 0

        async def call(self, method: str, proceed: Any) -> Any:
            self.calls += method == "use_budgets"
            return await proceed()

    counting = Counting()
    app = ff.App(database, middleware=[counting])
    app.budget("team", hard={"tokens": 1_000})
    together = asyncio.Barrier(40)

    @app.task(budgets=["team"], on_budget="raise")
    async def agent(ctx: ff.Context) -> int:
        await together.wait()
        try:
            async with ctx.spend(tokens=40) as spend:
                await together.wait()
                spend.settle(tokens=30)
        except ff.BudgetExceeded as error:
            assert error.used + error.held + 40 > 1_000
            await together.wait()
            return 0
        return 30

    async with app, asyncio.timeout(30), ff.Worker(app, concurrency=40):
        runs = await agent.submit_many([()] * 40)
        results = [await run.result() for run in runs]
        found = await (await app.client()).budget("team")
    assert sum(results) == found.usage["tokens"] == 750, "25 of 40 fit"
    assert found.held.get("tokens", 0) == 0
    assert counting.calls <= 10, "65 calls of 40 handlers"
