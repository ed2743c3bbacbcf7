"""The audit on damaged rows of flows: every rule finds its own violation."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from importlib import resources
from typing import Any

import pytest

from flowfabric.values.attempt import Claimed
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import FlowSubmitted, NewEdge, NewNode
from flowfabric.values.joins import AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum
from tests.ids import home
from tests.interleave import Party, Stage
from tests.sql.damage import Damage, finds, found, one_party  # noqa: F401 - a fixture among them
from tests.support import RETRY, claim_one

pytestmark = pytest.mark.asyncio(loop_scope="session")


# Where the damage is done


def _node(name: str, *after: str, **fields: Any) -> NewNode:
    """A node of its own kind, which puts its upstreams' results in the place of its input and beside it."""
    edges = [NewEdge(upstream=one, data_passing_ref="result", passes_result=True) for one in after]
    return NewNode(name=name, execution=NewExecution(execution_kind=name, policy=RETRY), after=edges, **fields)


async def _claim(engine: Party, kind: str) -> Claimed:
    return await claim_one(engine, kinds=[kind], lease_ttl=timedelta(days=1))


async def _chain(engine: Party) -> FlowSubmitted:
    """a -> b -> c"""
    return await engine.submit_flow([_node("a"), _node("b", "a"), _node("c", "b")])


async def _built(stage: Stage, engine: Party) -> None:
    await _chain(engine)


async def _counted(stage: Stage, engine: Party) -> None:
    await _chain(engine)
    await engine.project_flow_summaries()


async def _released(stage: Stage, engine: Party) -> None:
    """a has succeeded and b may be claimed."""
    await _chain(engine)
    await engine.complete((await _claim(engine, "a")).handle, b"a")


async def _skipped(stage: Stage, engine: Party) -> None:
    """a has failed; b is skipped; what that means for c is still to be done."""
    await _chain(engine)
    await engine.fail((await _claim(engine, "a")).handle, "no", failure_class="permanent")


async def _replayed(stage: Stage, engine: Party) -> None:
    """b waits for another end of a."""
    flow = await _chain(engine)
    await engine.fail((await _claim(engine, "a")).handle, "no", failure_class="permanent")
    await engine.dispatch_cascades()
    await engine.replay_execution(flow.nodes["b"])


async def _staged(stage: Stage, engine: Party) -> None:
    """An edge in the graph that gates nothing."""
    flow = await engine.submit_flow([_node("a"), _node("b")])
    await engine.stage_dependency_edge(
        flow.flow_id,
        edge_id=flow.flow_id,
        upstream_execution_id=flow.nodes["a"],
        downstream_execution_id=flow.nodes["b"],
        expected_graph_revision=2,
    )


async def _race(engine: Party, policy: EdgeGroupPolicy) -> FlowSubmitted:
    return await engine.submit_flow([_node("a"), _node("b"), _node("c"), _node("d", "a", "b", "c", policy=policy)])


async def _won(stage: Stage, engine: Party) -> None:
    """a has won; b and c are to be cancelled."""
    await _race(engine, AnyOf())
    await engine.complete((await _claim(engine, "a")).handle, b"a")


async def _lost(stage: Stage, engine: Party) -> None:
    """Two of three are no longer possible, and the third has been cancelled."""
    await _race(engine, Quorum(2))
    for kind in "ab":
        await engine.fail((await _claim(engine, kind)).handle, "no", failure_class="permanent")
    assert (await engine.cancel_siblings()).action == "drained"


async def _free(stage: Stage, engine: Party) -> None:
    """a has won, and the others run on."""
    await _race(engine, AnyOf(OnSatisfied.LET_RUN))
    await engine.complete((await _claim(engine, "a")).handle, b"a")


async def _of_one(stage: Stage, engine: Party) -> None:
    """Any one of three has to succeed, and none has ended."""
    await _race(engine, Quorum(1))


async def _cancelling(stage: Stage, engine: Party) -> None:
    """a is held by a worker, b and c are frozen; all are owed a cancel."""
    flow = await _chain(engine)
    await _claim(engine, "a")
    await engine.cancel_flow_header(flow.flow_id, reason="enough")


async def _lost_lease(stage: Stage, engine: Party) -> None:
    """No worker may take over a member that is to be cancelled."""
    flow = await _chain(engine)
    held = await _claim(engine, "a")
    await engine.cancel_flow_header(flow.flow_id)
    await engine.revoke_lease(held.execution_id)


async def _lost_lease_first(stage: Stage, engine: Party) -> None:
    flow = await _chain(engine)
    held = await _claim(engine, "a")
    await engine.revoke_lease(held.execution_id)
    await engine.cancel_flow_header(flow.flow_id)


async def _cancelled(stage: Stage, engine: Party) -> None:
    flow = await _chain(engine)
    await engine.cancel_flow(flow.flow_id, wait=True)


async def _retrying(stage: Stage, engine: Party) -> None:
    """b failed while it had one more upstream to wait for, and waits for that before it is tried again."""
    flow = await engine.submit_flow([_node("a"), _node("b")])
    held = await _claim(engine, "b")
    await engine.stage_dependency_edge(
        flow.flow_id,
        edge_id=flow.flow_id,
        upstream_execution_id=flow.nodes["a"],
        downstream_execution_id=flow.nodes["b"],
        expected_graph_revision=2,
    )
    await engine.apply_dependency_to_child(
        flow.flow_id,
        edge_id=flow.flow_id,
        upstream_execution_id=flow.nodes["a"],
        downstream_execution_id=flow.nodes["b"],
    )
    await engine.fail(held.handle, "again")


PLACES: dict[str, Callable[[Stage, Party], Awaitable[Any]]] = {
    "built": _built,
    "counted": _counted,
    "released": _released,
    "skipped": _skipped,
    "replayed": _replayed,
    "staged": _staged,
    "won": _won,
    "lost": _lost,
    "free": _free,
    "of one": _of_one,
    "cancelling": _cancelling,
    "lost lease": _lost_lease,
    "lost lease first": _lost_lease_first,
    "cancelled": _cancelled,
    "retrying": _retrying,
}


def _update(table: str) -> Callable[..., str]:
    return lambda changes, where="true": f"update flowfabric.{table} set {changes} where {where}"


_flow = _update("flow")
_edge = _update("edge")
_group = _update("edge_group")
_execution = _update("execution")
_MEMBER = "(select id from flowfabric.execution where node = '{}')"
_TO_B, _TO_C, _TO_D = (f"downstream = {_MEMBER.format(node)}" for node in "bcd")
_RESOLVED = "outcome = '{}', resolved_at = flowfabric.now()"

DAMAGES = [
    Damage("partition_of_id", "built", _flow("partition = (partition + 1) % 256")),
    Damage("partition_of_id", "built", _execution("partition = (partition + 1) % 256", "node = 'a'")),
    Damage("flow_counts", "built", _flow("node_count = 2")),
    Damage("flow_counts", "built", _flow("edge_count = edge_count + 1")),
    Damage("flow_counts", "built", _execution("flow_id = null", "node = 'a'")),
    Damage("flow_counts", "built", "delete from flowfabric.edge where " + _TO_C),
    Damage("flow_header", "built", _flow("state = 'completed'")),
    Damage("flow_header", "built", _flow("cancelled_at = now()")),
    Damage("flow_header", "built", _flow("last_mutation_at = created_at - '1 s'::interval")),
    Damage("flow_header", "cancelled", _flow("cancellation_policy = 'all'")),
    Damage("flow_header", "cancelled", _flow("cancelled_at = null")),
    Damage("flow_header", "cancelled", _flow("cancel_reason = null")),
    Damage("flow_header", "cancelled", _flow("state = 'open'")),
    Damage("flow_grew_closed", "cancelled", _edge("created_at = created_at + '1 h'::interval")),
    Damage("flow_grew_closed", "cancelled", _edge("applied_at = applied_at + '1 h'::interval")),
    Damage("flow_grew_closed", "cancelled", _execution("created_at = created_at + '1 h'::interval", "node = 'c'")),
    Damage("flow_missing", "built", "delete from flowfabric.flow"),
    Damage("flow_missing", "skipped", "update flowfabric.pending_cascade set flow_id = gen_random_uuid()"),
    Damage("flow_missing", "won", "update flowfabric.sibling_cancel set flow_id = gen_random_uuid()"),
    Damage("flow_missing", "cancelling", "update flowfabric.cancel_backlog set flow_id = gen_random_uuid()"),
    Damage("flow_missing", "cancelling", "update flowfabric.cancel_member set flow_id = gen_random_uuid()"),
    Damage("flow_missing", "counted", "update flowfabric.flow_summary set flow_id = gen_random_uuid()"),
    Damage("flow_missing", "built", _edge("flow_id = gen_random_uuid()", _TO_C)),
    Damage("flow_missing", "built", _group("flow_id = gen_random_uuid()", _TO_C)),
    Damage("edge_ends", "built", _edge("upstream = downstream", _TO_C)),
    Damage("edge_ends", "built", _edge("upstream = gen_random_uuid()", _TO_C)),
    Damage("edge_ends", "built", _edge("downstream = gen_random_uuid()", _TO_C)),
    Damage("edge_ends", "built", _execution("flow_id = null", "node = 'a'")),
    Damage("graph_acyclic", "built", _edge(f"upstream = {_MEMBER.format('c')}", _TO_B)),
    Damage("graph_acyclic", "built", _edge("upstream = downstream", _TO_B)),
    Damage("edge_facts", "built", _edge("outcome = 'success'", _TO_B)),
    Damage("edge_facts", "released", _edge("resolved_at = null", _TO_B)),
    Damage("edge_facts", "released", _edge("outcome = 'completed'", _TO_B)),
    Damage("edge_facts", "released", _edge("outcome = null, resolved_at = null", _TO_B)),
    Damage("edge_facts", "released", _edge("resolved_at = applied_at - '1 s'::interval", _TO_B)),
    Damage("edge_facts", "built", _edge("applied_at = created_at - '1 s'::interval", _TO_B)),
    Damage("edge_facts", "staged", _edge(_RESOLVED.format("success"))),
    Damage("edge_facts", "built", _edge("data_passing_ref = ''", _TO_B)),
    Damage("edge_without_group", "built", "delete from flowfabric.edge_group where " + _TO_C),
    Damage("group_counts", "built", _group("n = n + 1", _TO_C)),
    Damage("group_counts", "released", _group("succeeded = 0", _TO_B)),
    Damage("group_counts", "skipped", _group("failed = 0, skipped = 1", _TO_B)),
    Damage("group_counts", "lost", _edge("outcome = 'skipped'", "outcome = 'failed'")),
    Damage("group_counts", "staged", _edge("applied_at = created_at") + "; " + "insert into flowfabric.edge_group"
           " select partition, flow_id, downstream from flowfabric.edge"),
    Damage("group_policy", "built", _group("policy = 'most_of'")),
    Damage("group_policy", "built", _group("k = 1")),
    Damage("group_policy", "built", _group("cancel_rest = true")),
    Damage("group_policy", "won", _group("k = 2")),
    Damage("group_policy", "won", _group("k = null")),
    Damage("group_policy", "lost", _group("k = 0")),
    Damage("group_decision", "released", _group("state = 'pending', satisfied_at = null", _TO_B)),
    Damage("group_decision", "built", _group("state = 'satisfied', satisfied_at = now()", _TO_B)),
    Damage("group_decision", "built", _group("state = 'impossible'", _TO_B)),
    Damage("group_decision", "skipped", _group("state = 'satisfied', satisfied_at = now()", _TO_B)),
    Damage("group_decision", "built", _group("state = 'cancelled'", _TO_B)),
    Damage("group_decision", "won", _group("state = 'pending', satisfied_at = null")),
    Damage("group_decision", "won", _group("state = 'impossible', satisfied_at = null")),
    Damage("group_decision", "lost", _group("state = 'satisfied', satisfied_at = now()")),
    Damage("group_decision", "lost", _group("state = 'pending'")),
    Damage("group_satisfied_at", "released", _group("satisfied_at = null", _TO_B)),
    Damage("group_satisfied_at", "built", _group("satisfied_at = now()", _TO_B)),
    Damage("held_back", "built", _execution("state = 'waiting', blocking_reason = 'waiting_for_worker',"
           " blocking_detail = null", "node = 'b'")),
    Damage("held_back", "built", _execution("state = 'delayed', delay_until = now()", "node = 'b'")),
    Damage("held_back", "released", _execution("state = 'waiting_children', blocking_detail = 'x',"
           " blocking_reason = 'waiting_for_children'", "node = 'b'")),
    Damage("held_back", "built", _execution("state = 'waiting_children', blocking_detail = 'x',"
           " blocking_reason = 'waiting_for_children'", "node = 'a'")),
    Damage("held_back", "built", _execution("flow_id = null", "node = 'b'")),
    Damage("impossible_alive", "skipped", _execution("state = 'waiting', completed_at = null", "node = 'b'")),
    Damage("impossible_alive", "skipped", _execution("state = 'active', completed_at = null", "node = 'b'")),
    Damage("impossible_alive", "built", _group("state = 'impossible'", _TO_C)),
    Damage("skipped_group", "skipped", _group("state = 'pending'", _TO_B)),
    Damage("skipped_group", "skipped", "delete from flowfabric.edge_group where " + _TO_B),
    Damage("skipped_group", "released", _execution("state = 'skipped', completed_at = now()", "node = 'a'")),
    Damage("input_row", "released", _execution("has_inputs = false", "node = 'b'")),
    Damage("input_row", "built", _execution("has_inputs = false", "node = 'b'")),
    Damage("input_row", "released", "update flowfabric.injected_input set upstream = id"),
    Damage("input_row", "released", "update flowfabric.injected_input set id = gen_random_uuid()"),
    Damage("edge_forgotten", "skipped", "delete from flowfabric.pending_cascade"),
    Damage("edge_forgotten", "skipped", f"update flowfabric.pending_cascade set id = {_MEMBER.format('a')}"),
    Damage("edge_forgotten", "skipped", "update flowfabric.pending_cascade set run = -1"),
    Damage("edge_forgotten", "skipped", "update flowfabric.pending_cascade set after = ('f' || repeat('0', 31))::uuid"),
    Damage("edge_forgotten", "released", _edge("outcome = null, resolved_at = null, resolved_event = null", _TO_B)),
    Damage("edge_forgotten", "replayed", _edge("from_run = 0", _TO_B)),
    Damage("edge_forgotten", "built", _execution("replays = 1", "node = 'a'")),
    Damage("edge_ahead", "built", _edge("from_run = 1", _TO_B)),
    Damage("edge_ahead", "replayed", _edge("from_run = 2", _TO_B)),
    Damage("cascade_row", "skipped", "update flowfabric.pending_cascade set run = 1"),
    Damage("cascade_row", "skipped", "update flowfabric.pending_cascade set outcome = 'success'"),
    Damage("cascade_row", "skipped", "update flowfabric.pending_cascade set outcome = 'completed'"),
    Damage("cascade_row", "skipped", "update flowfabric.pending_cascade set id = gen_random_uuid()"),
    Damage("sibling_row", "won", _group("cancel_siblings_pending = false")),
    Damage("sibling_row", "won", "delete from flowfabric.edge_group"),
    Damage("sibling_flag", "won", "delete from flowfabric.sibling_cancel"),
    Damage("sibling_flag", "won", _group("cancel_rest = false")),
    Damage("sibling_flag", "won", _group("cancel_siblings_reason = 'sibling_quorum_impossible'")),
    Damage("sibling_flag", "lost", _group("cancel_siblings_reason = 'sibling_quorum_satisfied'")),
    Damage("sibling_flag", "lost", _group("cancel_siblings_reason = null")),
    Damage("sibling_flag", "free", _group("cancel_siblings_reason = 'sibling_quorum_satisfied'")),
    Damage("sibling_flag", "free", _group("cancel_siblings_pending = true")),
    Damage("sibling_flag", "free", _group("cancel_rest = true")),
    Damage("sibling_flag", "released", _group("cancel_siblings_pending = true")),
    Damage("sibling_forgotten", "won", _group("cancel_siblings_pending = false")
           + "; delete from flowfabric.sibling_cancel"),
    Damage("sibling_forgotten", "won", "update flowfabric.sibling_cancel set siblings = siblings[:1]"),
    Damage("sibling_forgotten", "lost", _execution("state = 'waiting', completed_at = null", "node = 'c'")),
    Damage("cancel_owed", "cancelling", "delete from flowfabric.cancel_backlog"),
    Damage("cancel_owed", "cancelling", "update flowfabric.cancel_member set id = gen_random_uuid() where id = "
           + _MEMBER.format("a")),
    Damage("cancel_owed", "cancelling", _execution("blocking_reason = 'waiting_for_worker'", "node = 'b'")),
    Damage("cancel_backlog", "cancelling", "delete from flowfabric.cancel_member"),
    Damage("cancel_backlog", "cancelling", _flow("cancellation_policy = 'cancel_pending'")),
    Damage("cancel_backlog", "cancelling", _flow("cancel_reason = 'other'")),
    Damage("cancel_backlog", "cancelling", _flow("state = 'open'")),
    Damage("cancel_backlog", "cancelling", _flow("cancellation_policy = 'flow_only'")
           + "; update flowfabric.cancel_backlog set cancellation_policy = 'flow_only'"),
    Damage("cancel_forgotten", "cancelling", "delete from flowfabric.cancel_member where id = " + _MEMBER.format("a")),
    Damage("cancel_forgotten", "cancelling", "delete from flowfabric.cancel_member where id = " + _MEMBER.format("b")),
    Damage("cancel_forgotten", "cancelled", _execution("state = 'active', completed_at = null", "node = 'a'")),
    Damage("flow_summary", "counted", "update flowfabric.flow_summary set waiting = waiting + 1"),
    Damage("flow_summary", "counted", "update flowfabric.flow_summary set state = 'open'"),
    Damage("flow_summary", "counted", "delete from flowfabric.flow_summary"),
    Damage("flow_summary", "counted", _execution("state = 'completed', completed_at = now()", "node = 'a'")),
    Damage("flow_summary", "built", "delete from flowfabric.flow_touched"),
    Damage("edge_event", "released", _edge("outcome = 'failed'", _TO_B)),
    Damage("edge_event", "released", _edge("resolved_event = resolved_event + 1000", _TO_B)),
    Damage("cascade_event", "skipped", "update flowfabric.pending_cascade set seq = seq + 1000"),
    Damage("cascade_event", "skipped", "delete from flowfabric.event where outcome = 'skipped'"),
    Damage("cancel_requested_event", "cancelled", "delete from flowfabric.event where operator_type is not null"),
    Damage("cancel_requested_event", "cancelled", _flow("state = 'open'")),
    Damage("ready_row", "lost lease", "insert into flowfabric.ready (route, rank, created_at, id, partition,"
           " available_at) select route, 9000 - priority, created_at, id, partition, now() from flowfabric.execution"
           " where node = 'a'"),
    Damage("ready_row", "lost lease", "delete from flowfabric.cancel_member"),
    Damage("ready_row", "released", "delete from flowfabric.ready"),
    Damage("state_facts", "built", _execution("blocking_detail = null", "node = 'b'")),
    Damage("state_facts", "built", _execution("pending = null", "node = 'b'")),
    Damage("state_facts", "retrying", _execution("blocking_reason = 'waiting_for_retry_backoff'", "node = 'b'")),
    Damage("state_facts", "cancelling", _execution("delay_until = now()", "node = 'b'")),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
async def test_a_sound_database_has_no_violations(stage: Stage, engine: Party, place: str) -> None:
    await PLACES[place](stage, engine)
    assert await found(stage) == set()
    await engine.project_flow_summaries()
    assert await found(stage) == set()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: f"{d.rule}, {d.place}, {d.sql.split('flowfabric.', 1)[1]}")
async def test_a_rule_finds_its_damage(stage: Stage, engine: Party, damage: Damage) -> None:
    await PLACES[damage.place](stage, engine)
    assert await found(stage) == set()
    await finds(stage, damage.rule, damage.sql)


async def test_every_rule_about_flows_is_tried() -> None:
    folder = resources.files("flowfabric._postgres") / "sql" / "functions" / "audit"
    about = re.compile(r"flowfabric\.(flow|edge|edge_group|injected_input|pending_cascade|sibling_cancel|cancel_\w+) ")
    # ready_row reads who is owed a cancel; test_children.py tries child_forgotten
    others = ("ready_row.sql", "child_forgotten.sql")
    texts = [file.read_text() for file in folder.iterdir() if file.name not in others]
    rules = {rule for text in texts if about.search(text) for rule in re.findall(r"select '([a-z_]+)'", text)}
    assert rules and rules <= {damage.rule for damage in DAMAGES}


async def test_the_audit_of_one_partition_checks_only_that_partition(stage: Stage, engine: Party) -> None:
    flow = await _chain(engine)
    await stage.watch.execute(_flow("node_count = 7"))
    mine = home(flow.nodes["a"])
    assert await found(stage, mine) == {"flow_counts"}
    assert await found(stage, (mine + 1) % 256) == set()
