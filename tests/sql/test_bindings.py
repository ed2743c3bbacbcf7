"""Bindings: limits that submissions get by their lane, kind, namespace, tag or flow."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import flowfabric as ff
from flowfabric._duties import Unblock
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.execution import Created, NewExecution
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import ExecutionId, FlowId, fit_partition, mint_uuid
from flowfabric.values.policies import ExecutionPolicy, OwnBudget
from tests.each import each
from tests.ids import home
from tests.interleave import PATIENCE, Stage, waiting
from tests.sql.test_budgets import make
from tests.support import OTHER, CheckedEngine, claim_one, started, submit

pytestmark = pytest.mark.both_servers


async def quota(engine: ff.Engine, name: str, **fields: Any) -> UUID:
    return (await engine.create_quota_policy(name=name, max_concurrent=1, **fields)).quota_policy_id


async def limits(engine: ff.Engine, execution_id: ExecutionId) -> set[UUID]:
    found = await engine.read_execution(execution_id)
    assert found is not None
    return {*found.budget_ids, *found.quota_policy_ids}


# The scope, a submission that has it, and submissions that lack one part of it.
SCOPES: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "lane": ({"lane": "gpu"}, {"lane_id": "gpu"}, [{}, {"lane_id": "gpus"}]),
    "kind": ({"kind": "chat"}, {"execution_kind": "chat"}, [{}, {"execution_kind": "chats"}]),
    "namespace": ({"namespace": "eu"}, {"namespace": "eu"}, [{}, {"namespace": "us"}]),
    "tag": (
        {"tag": ("plan", "free")},
        {"tags": {"plan": "free", "x": "y"}},
        [{}, {"tags": {"plan": "paid"}}, {"tags": {"x": "free"}}, {"tags": {"plan free": "", "free": "plan"}}],
    ),
    "a tag without a value": ({"tag": ("plan", "")}, {"tags": {"plan": ""}}, [{}, {"tags": {"plan": "x"}}]),
    "a long tag": (
        {"tag": ("plan", "x" * 300 + "a")},
        {"tags": {"plan": "x" * 300 + "a"}},
        [{"tags": {"plan": "x" * 300 + "b"}}, {"tags": {"plan": "x" * 300}}],
    ),
    "two of them": (
        {"lane": "gpu", "kind": "chat"},
        {"lane_id": "gpu", "execution_kind": "chat"},
        [{"lane_id": "gpu"}, {"execution_kind": "chat"}],
    ),
    "all but a flow": (
        {"lane": "gpu", "kind": "chat", "namespace": "eu", "tag": ("plan", "free")},
        {"lane_id": "gpu", "execution_kind": "chat", "namespace": "eu", "tags": {"plan": "free"}},
        [
            {"execution_kind": "chat", "namespace": "eu", "tags": {"plan": "free"}},
            {"lane_id": "gpu", "namespace": "eu", "tags": {"plan": "free"}},
            {"lane_id": "gpu", "execution_kind": "chat", "tags": {"plan": "free"}},
            {"lane_id": "gpu", "execution_kind": "chat", "namespace": "eu"},
        ],
    ),
    "a flow": ({"flow": "nightly"}, {}, [{}]),
}


@each("row", SCOPES)
async def test_a_submission_gets_what_is_bound_to_all_of_its_scope(engine: CheckedEngine, row: str) -> None:
    scope, matching, others = SCOPES[row]
    budget, policy = await make(engine), await quota(engine, row)
    before = await submit(engine, **matching)
    for limit in (budget, policy):
        assert await engine.bind_limit(limit, ff.Bind(**scope)) is True
        assert await engine.bind_limit(limit, ff.Bind(**scope)) is False
    assert await limits(engine, before) == set()
    expected = set() if "flow" in scope else {budget, policy}
    assert await limits(engine, await submit(engine, **matching)) == expected
    for other in others:
        assert await limits(engine, await submit(engine, **other)) == set()
    items = [
        NewExecution(**{"execution_kind": "test", **fields}) for fields in (matching, *others, matching) for _ in "ab"
    ]
    made = [one.execution_id for one in await engine.create_many(items) if isinstance(one, Created)]
    assert [await limits(engine, one) for one in made] == [
        expected if place in (0, 1, len(made) - 2, len(made) - 1) else set() for place in range(len(made))
    ]
    for limit in (budget, policy):
        assert await engine.unbind_limit(limit, ff.Bind(**scope)) is True
        assert await engine.unbind_limit(limit, ff.Bind(**scope)) is False
    assert await limits(engine, await submit(engine, **matching)) == set()
    assert await limits(engine, made[0]) == expected


async def test_bound_limits_are_added_to_those_a_submission_names(engine: CheckedEngine) -> None:
    bound, named = await make(engine), await make(engine)
    await engine.bind_limit(bound, ff.Bind(kind="test"))
    policy = ExecutionPolicy(budget_ids=(named, bound), budget=OwnBudget(hard={"t": 1}))
    made = await submit(engine, policy=policy)
    assert await limits(engine, made) == {bound, named, made}
    items = [NewExecution(execution_kind=kind, policy=policy) for kind in ("other", "test")]
    first, second = [one.execution_id for one in await engine.create_many(items) if isinstance(one, Created)]
    assert await limits(engine, first) == {bound, named, first}
    assert await limits(engine, second) == {bound, named, second}


async def test_nodes_of_a_flow_get_what_is_bound_to_it(engine: CheckedEngine) -> None:
    of_flow, of_both, of_kind = await make(engine), await make(engine), await make(engine)
    await engine.bind_limit(of_flow, ff.Bind(flow="nightly"))
    await engine.bind_limit(of_both, ff.Bind(flow="nightly", kind="b"))
    await engine.bind_limit(of_kind, ff.Bind(kind="c"))
    nodes = [NewNode(name=name, execution=NewExecution(execution_kind=name)) for name in "abc"]
    expected = {"nightly": {"a": {of_flow}, "b": {of_flow, of_both}, "c": {of_flow, of_kind}}, "": {"c": {of_kind}}}
    for kind in ("nightly", "", "weekly"):
        made = await engine.submit_flow(nodes, flow_kind=kind)
        members = await engine.list_flow_members(made.flow_id)
        found = {one.name: await limits(engine, one.execution_id) for one in members}
        assert found == {"a": set(), "b": set(), "c": {of_kind}, **expected.get(kind, {})}
        if kind == "nightly":
            more = [NewNode(name="d", execution=NewExecution(execution_kind="d"))]
            await engine.extend_flow(made.flow_id, more)
            (last,) = [one for one in await engine.list_flow_members(made.flow_id) if one.name == "d"]
            assert await limits(engine, last.execution_id) == {of_flow}


async def test_children_get_what_is_bound_to_them_and_inherit_budgets(engine: CheckedEngine) -> None:
    of_parent, of_child, rate = await make(engine), await make(engine), await quota(engine, "q")
    await engine.bind_limit(of_parent, ff.Bind(kind="test"))
    await engine.bind_limit(of_child, ff.Bind(kind="child"))
    await engine.bind_limit(rate, ff.Bind(kind="child"))
    parent = await started(engine)
    child = await engine.submit_child(parent.handle, "a", 0, NewExecution(execution_kind="child"))
    assert await limits(engine, child.execution_id) == {of_parent, of_child, rate}
    flow_id = FlowId(fit_partition(mint_uuid(), home(parent.execution_id), 256))
    nodes = [NewNode(name="n", execution=NewExecution(execution_kind="child"))]
    await engine.submit_child_flow(parent.handle, "f", 0, nodes, flow_id=flow_id, seed=mint_uuid())
    (member,) = await engine.list_flow_members(flow_id)
    assert await limits(engine, member.execution_id) == {of_parent, of_child, rate}


async def test_a_bound_quota_holds_for_each_value_of_its_key(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    rate = await quota(engine, "q", key="tenant")
    await engine.bind_limit(rate, ff.Bind(kind="test"))
    for tags in ({"tenant": "a"}, {"tenant": "a"}, {"tenant": "b"}, {}):
        await submit(engine, tags=tags)
    keys = await sql.fetchval("select array_agg(k order by k) from flowfabric.limit_set, unnest(quota_keys) as k")
    assert keys == ["a", "b", "default"]
    found = [await engine.claim(**OTHER) for _ in range(5)]
    assert sum(one is not None for one in found) == 3


async def test_a_binding_holds_executions_back_as_a_named_limit_does(engine: CheckedEngine) -> None:
    budget = await make(engine, {"t": 5})
    await engine.bind_limit(budget, ff.Bind(lane="default"))
    await submit(engine)
    await submit(engine)
    held = await claim_one(engine)
    await engine.report_usage(held.handle, {"t": 5})
    assert await engine.claim(**OTHER) is None
    await engine.unbind_limit(budget, ff.Bind(lane="default"))
    assert await engine.claim(**OTHER) is None, "what was submitted keeps its limits"
    await engine.reset_budget(budget)
    await claim_one(engine, **OTHER)


async def test_a_binding_of_another_scope_leaves_plain_submissions_alone(
    engine: CheckedEngine, sql: asyncpg.Connection[Any]
) -> None:
    await submit(engine)
    budget = await make(engine)
    for scope in (ff.Bind(tag=("a", "b")), ff.Bind(lane="x"), ff.Bind(kind="x"), ff.Bind(kind="test", namespace="n")):
        await engine.bind_limit(budget, scope)
    assert await limits(engine, await submit(engine)) == set()
    assert await sql.fetchval("select count(*) from flowfabric.route") == 1


async def test_bindings_are_listed_by_limit_in_pages(engine: CheckedEngine) -> None:
    first, second = await make(engine, name="one"), await quota(engine, "two")
    scopes = [
        ff.Bind(lane="a"), ff.Bind(kind="b"), ff.Bind(namespace="c"), ff.Bind(tag=("d", "e")), ff.Bind(flow="f"),
    ]  # fmt: skip
    for scope in scopes:
        await engine.bind_limit(first, scope)
    await engine.bind_limit(second, scopes[0], is_declared=True)
    (only,) = (await engine.list_bindings(limit_id=second)).items
    assert (only.what, only.limit_id, only.name, only.bind, only.is_declared) == (
        "quota",
        second,
        "two",
        scopes[0],
        True,
    )
    found, cursor = [], None
    while True:
        page = await engine.list_bindings(cursor=cursor, limit=2)
        found += page.items
        if (cursor := page.next_cursor) is None:
            break
    assert len(found) == 6
    mine = [one for one in found if one.limit_id == first]
    assert {one.bind for one in mine} == set(scopes)
    assert {(one.what, one.name, one.is_declared) for one in mine} == {("budget", "one", False)}


async def test_only_limits_that_exist_and_belong_to_no_run_are_bound(engine: CheckedEngine) -> None:
    with pytest.raises(NotFound):
        await engine.bind_limit(mint_uuid(), ff.Bind(kind="a"))
    reported = mint_uuid()
    await engine.report_usage_admin(reported, dimensions=["t"], deltas=[1])  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await engine.bind_limit(reported, ff.Bind(kind="a"))
    own = await submit(engine, policy=ExecutionPolicy(budget=OwnBudget(hard={"t": 1})))
    with pytest.raises(InvalidInput, match="belongs to one run"):
        await engine.bind_limit(own, ff.Bind(kind="a"))
    assert not (await engine.list_bindings()).items


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("bind", {}),
    "an empty lane": ("lane", {"lane": ""}),
    "a lane of another type": ("lane", {"lane": 5}),
    "an empty kind": ("kind", {"kind": ""}),
    "a kind with a zero": ("kind", {"kind": "a\0"}),
    "an empty namespace": ("namespace", {"namespace": ""}),
    "a tag that is no pair": ("tag", {"tag": "ab"}),
    "a tag of three": ("tag", {"tag": ("a", "b", "c")}),
    "a tag without a key": ("tag", {"tag": ("", "b")}),
    "a tag with a number": ("tag", {"tag": ("a", 5)}),
    "a tag that is too long": ("tag", {"tag": ("a", "x" * 5000)}),
    "an empty flow": ("flow", {"flow": ""}),
}


@each("row", BAD)
def test_a_scope_that_cannot_match_is_refused(row: str) -> None:
    field, scope = BAD[row]
    with pytest.raises(InvalidInput) as refused:
        ff.Bind(**scope)
    assert refused.value.field == field


async def test_the_audit_finds_bindings_that_lead_nowhere(engine: CheckedEngine, sql: asyncpg.Connection[Any]) -> None:
    budget = await make(engine)
    await submit(engine, execution_kind="a")
    await engine.bind_limit(budget, ff.Bind(kind="a"))
    async with sql.transaction():
        await sql.execute("update flowfabric.route set is_free = true")
        rules = await sql.fetch("select rule from flowfabric.audit(null, false)")
        assert [row["rule"] for row in rules] == ["limit_binding"]
        await sql.execute("update flowfabric.route set is_free = false")
    for change in ("anchor = 'kind b'", "kind = 'b'", "limit_id = gen_random_uuid()", "what = 'quota'"):
        change_back = sql.transaction()
        await change_back.start()
        await sql.execute(f"update flowfabric.limit_binding set {change}")
        rules = await sql.fetch("select rule from flowfabric.audit(null, false)")
        await change_back.rollback()
        assert [row["rule"] for row in rules] == ["limit_binding"], change


# ---- routes that say that no binding concerns them


async def free(stage: Stage) -> dict[tuple[str, str], bool]:
    found = await stage.watch.fetch("select lane, kind, is_free from flowfabric.route where not limited")
    return {(row["lane"], row["kind"]): row["is_free"] for row in found}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_binding_waits_for_a_route_that_is_being_created(stage: Stage) -> None:
    """The route was created without it: the binding takes the mark away, and later submissions get the limit."""
    await stage.empty()
    one, two = await stage.company(2)
    policy = await quota(one, "q")
    await one.begin()
    first = await submit(one, lane_id="new", execution_kind="k")
    binding = await waiting(stage.watch, two, two.bind_limit(policy, ff.Bind(lane="new")), behind=one)
    assert await limits(one, await submit(one, lane_id="new", execution_kind="k")) == set()
    await one.commit()
    assert await asyncio.wait_for(binding, PATIENCE) is True
    assert await free(stage) == {("new", "k"): False}
    assert await limits(one, first) == set()
    assert await limits(one, await submit(one, lane_id="new", execution_kind="k")) == {policy}
    await stage.audit()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_route_that_is_created_while_a_binding_is_stored_does_not_wait_and_is_looked_at_later(
    stage: Stage,
) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    policy = await quota(one, "q")
    await one.begin()
    await one.bind_limit(policy, ff.Bind(kind="k"))
    for kind in ("k", "other"):  # neither waits: the binding is not committed
        assert await limits(two, await submit(two, execution_kind=kind)) == set()
    await one.commit()
    assert await limits(two, await submit(two, execution_kind="k")) == {policy}
    assert await limits(two, await submit(two, execution_kind="other")) == set()
    assert await free(stage) == {("default", "k"): False, ("default", "other"): False}
    await Unblock(one).run_once()
    assert await free(stage) == {("default", "k"): False, ("default", "other"): True}
    await one.unbind_limit(policy, ff.Bind(kind="k"))
    assert await free(stage) == {("default", "k"): True, ("default", "other"): True}
    assert await limits(two, await submit(two, execution_kind="k")) == set()
    await stage.audit()


@pytest.mark.asyncio(loop_scope="session")
async def test_an_old_snapshot_marks_no_route_as_free(stage: Stage) -> None:
    await stage.empty()
    one, two = await stage.company(2)
    policy = await quota(one, "q")
    await one.begin("repeatable read")
    await one.connection.fetch("select from flowfabric.route")
    await two.bind_limit(policy, ff.Bind(lane="new"))
    await submit(one, lane_id="new", execution_kind="k")
    await one.commit()
    assert await free(stage) == {("new", "k"): False}
    assert await limits(two, await submit(two, lane_id="new", execution_kind="k")) == {policy}
    await stage.audit()
