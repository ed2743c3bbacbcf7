"""Graphs without a database: validity, order, cycles; policies as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.errors import Conflict
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge, NewNode, check_graph
from flowfabric.values.joins import (
    MAX_QUORUM,
    AllOf,
    AllSettled,
    AnyOf,
    EdgeGroupPolicy,
    OnSatisfied,
    Quorum,
    check_policy,
    policy_from_json,
    policy_to_json,
)

MEMBER = ff.ExecutionId(UUID("0b0e8400-e29b-41d4-a716-446655440000"))
WORK = NewExecution(execution_kind="k")


def node(name: str, *after: str | ff.ExecutionId, policy: EdgeGroupPolicy | None = None) -> NewNode:
    edges = [NewEdge(upstream=one) for one in after]
    return NewNode(name=name, execution=WORK, after=edges, policy=AllOf() if policy is None else policy)


def names_in_order(nodes: Sequence[NewNode]) -> list[str]:
    return [nodes[place].name for place in check_graph(nodes)]


# Order.


@st.composite
def acyclic(draw: st.DrawFn) -> list[NewNode]:
    """Nodes that come after some of those drawn before them, given in any order."""
    names = draw(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
                          min_size=1, max_size=12, unique=True))  # fmt: skip
    nodes = [
        node(name, *draw(st.lists(st.sampled_from([*names[:place], MEMBER]), max_size=4)))
        for place, name in enumerate(names)
    ]
    return draw(st.permutations(nodes))


@given(acyclic())
def test_every_node_appears_once_and_after_its_upstreams(nodes: list[NewNode]) -> None:
    order = check_graph(nodes)
    assert sorted(order) == list(range(len(nodes)))
    place = {nodes[number].name: place for place, number in enumerate(order)}
    for one in nodes:
        for edge in one.after:
            if edge.upstream != MEMBER:
                assert place[str(edge.upstream)] < place[one.name]


def test_nodes_without_upstreams_keep_their_order() -> None:
    assert names_in_order([node("c"), node("a"), node("b", MEMBER)]) == ["c", "a", "b"]
    assert names_in_order([node("d", "b", "c"), node("c", "a"), node("b", "a"), node("a")]) == ["a", "c", "b", "d"]


def test_an_edge_may_be_given_twice() -> None:
    assert names_in_order([node("b", "a", "a", policy=Quorum(2)), node("a")]) == ["a", "b"]


@pytest.mark.parametrize("count", [1, 10_000])
def test_long_and_wide_graphs_are_no_matter(count: int) -> None:
    names = [f"n{place}" for place in range(count)]
    chain = [node(name, *names[max(place - 1, 0) : place]) for place, name in enumerate(names)]
    assert names_in_order(chain[::-1]) == names
    fan = [node("first"), *(node(name, "first") for name in names), node("last", *names)]
    assert names_in_order(fan) == ["first", *names, "last"]


# Cycles.


@st.composite
def any_edges(draw: st.DrawFn) -> list[NewNode]:
    """Nodes with edges in all directions, but none to itself."""
    count = draw(st.integers(2, 9))
    edges = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=2 * count))
    return [
        node(f"n{place}", *(f"n{up}" for up, down in sorted(edges) if down == place != up)) for place in range(count)
    ]


def has_cycle(nodes: Sequence[NewNode]) -> bool:
    """Take away what comes after nothing that is left, until nothing can be taken away."""
    left = {one.name: {str(edge.upstream) for edge in one.after} for one in nodes}
    while free := [name for name, after in left.items() if not after & left.keys()]:
        for name in free:
            del left[name]
    return bool(left)


def cycle_in(nodes: Sequence[NewNode]) -> list[str]:
    with pytest.raises(Conflict) as refused:
        check_graph(nodes)
    assert refused.value.kind == "cycle_detected"
    return refused.value.detail.split(" -> ")


@given(any_edges())
def test_exactly_the_graphs_with_a_cycle_are_refused_with_the_cycle(nodes: list[NewNode]) -> None:
    if not has_cycle(nodes):
        assert len(check_graph(nodes)) == len(nodes)
        return
    path = cycle_in(nodes)
    edges = {(edge.upstream, one.name) for one in nodes for edge in one.after}
    assert len(path) >= 3
    assert path[0] == path[-1]
    assert len(set(path[1:])) == len(path) - 1
    assert set(pairwise(path)) <= edges


def test_the_path_goes_from_upstream_to_downstream() -> None:
    ring = [node("a", "c"), node("b", "a"), node("c", "b")]
    tail = [node("t", "c"), node("u", "t"), node("root"), node("v", "root")]
    for nodes in (ring, ring + tail, tail + ring):
        path = cycle_in(nodes)
        assert " -> ".join(path) in ("a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c")


def test_a_cycle_of_many_nodes_is_reported_completely() -> None:
    count = 10_000
    path = cycle_in([node(f"n{place}", f"n{(place - 1) % count}") for place in range(count)])
    assert len(path) == count + 1
    assert len(set(path)) == count


def test_a_node_that_comes_after_itself_is_named() -> None:
    with pytest.raises(Conflict, match="'b' comes after itself") as refused:
        check_graph([node("a"), node("b", "a", "b")])
    assert refused.value.kind == "self_referencing_edge"


# Names, edges and policies of nodes.


def refused_field(nodes: Any) -> tuple[str | None, str]:
    with pytest.raises(ff.InvalidInput) as refused:
        check_graph(nodes)
    return refused.value.field, str(refused.value)


def test_an_unknown_upstream_is_named_with_its_downstream() -> None:
    field, text = refused_field([node("a"), node("b", "a", "x")])
    assert field == "nodes[1].after"
    assert "'b' comes after 'x'" in text


@pytest.mark.parametrize(
    ("nodes", "field"),
    [
        ([node("a"), node("b"), node("a")], "nodes[2].name"),
        ([node("a"), node("")], "nodes[1].name"),
        ([node("é" * 129)], "nodes[0].name"),
        ([node("a\0b")], "nodes[0].name"),
        ([NewNode(name=["a"], execution=WORK)], "nodes[0].name"),  # type: ignore[arg-type]
        ([node("a"), "b"], "nodes[1]"),
        ([NewNode(name="a", execution=5)], "nodes[0].execution"),  # type: ignore[arg-type]
        ([NewNode(name="a", execution=WORK, after="b"), node("b")], "nodes[0].after"),  # type: ignore[arg-type]
        ([NewNode(name="a", execution=WORK, after=["b"]), node("b")], "nodes[0].after"),  # type: ignore[list-item]
        ([node("a", ["b"]), node("b")], "nodes[0].after"),  # type: ignore[arg-type]
        ([node("a", "0b0e8400-e29b-41d4-a716-446655440000"), node("b")], "nodes[0].after"),
        ([node("a"), node("b", "a", policy=5)], "nodes[1].policy"),  # type: ignore[arg-type]
        ([node("a"), node("b", "a", policy=Quorum(0))], "nodes[1].policy.k"),
        ([node("a"), node("b", "a", policy={"kind": "quorum", "k": 0})], "nodes[1].policy.k"),  # type: ignore[arg-type]
        ([node("a"), node("b", "a", policy=AnyOf("stop"))], "nodes[1].policy.on_satisfied"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_invalid_node_is_named_by_its_index(nodes: Any, field: str) -> None:
    assert refused_field(nodes)[0] == field


@given(st.integers(0, 4), st.integers(0, 2), st.integers(1, 8))
def test_a_quorum_of_more_than_there_are_is_refused(nodes: int, members: int, k: int) -> None:
    ups = [f"u{number}" for number in range(nodes)]
    join = node("join", *ups, *[MEMBER] * members, policy=Quorum(k))
    graph = [*map(node, ups), join]
    if k <= nodes + members:
        assert len(check_graph(graph)) == nodes + 1
        return
    field, text = refused_field(graph)
    assert field == f"nodes[{nodes}].policy"
    assert f"'join' wants {k} of {nodes + members} upstreams" in text


def test_any_of_nothing_is_refused_and_all_of_nothing_is_not() -> None:
    assert refused_field([node("a", policy=AnyOf())])[0] == "nodes[0].policy"
    assert check_graph([node("a", policy=AllOf())]) == [0]
    assert check_graph([node("a", policy=AllSettled())]) == [0]
    assert check_graph([node("a", MEMBER, policy=AnyOf())]) == [0]
    assert check_graph([]) == []


# Policies.

RESTS = st.sampled_from(OnSatisfied)
POLICIES = st.one_of(
    st.just(AllOf()), st.just(AllSettled()), st.builds(AnyOf, RESTS),
    st.builds(Quorum, st.integers(1, MAX_QUORUM), RESTS),
)  # fmt: skip


@given(POLICIES)
def test_a_policy_comes_back_from_its_wire_form(policy: EdgeGroupPolicy) -> None:
    wire = json.loads(json.dumps(policy_to_json(policy)))
    assert policy_from_json(wire) == policy
    assert check_policy(policy) == check_policy(wire) == policy


@pytest.mark.parametrize(
    ("policy", "wire"),
    [
        (AllOf(), {"kind": "all_of"}),
        (AllSettled(), {"kind": "all_settled"}),
        (AnyOf(), {"kind": "any_of", "on_satisfied": "cancel_remaining"}),
        (AnyOf(OnSatisfied.LET_RUN), {"kind": "any_of", "on_satisfied": "let_run"}),
        (Quorum(3), {"kind": "quorum", "k": 3, "on_satisfied": "cancel_remaining"}),
        (Quorum(3, OnSatisfied.LET_RUN), {"kind": "quorum", "k": 3, "on_satisfied": "let_run"}),
    ],
)
def test_the_wire_form_is_that_of_the_contract(policy: EdgeGroupPolicy, wire: dict[str, Any]) -> None:
    assert policy_to_json(policy) == wire
    if wire.get("on_satisfied") == "cancel_remaining":
        assert policy_from_json({name: value for name, value in wire.items() if name != "on_satisfied"}) == policy


def test_words_are_taken_for_what_happens_to_the_rest() -> None:
    for given_word in ("let_run", OnSatisfied.LET_RUN):
        for policy in (AnyOf(given_word), Quorum(2, given_word)):  # type: ignore[arg-type]
            checked = check_policy(policy)
            assert isinstance(checked, AnyOf | Quorum)
            assert checked.on_satisfied is OnSatisfied.LET_RUN


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "p"),
        ("all_of", "p"),
        (AllOf, "p"),
        (UUID(int=0), "p"),
        ({}, "p"),
        ({"kind": "every"}, "p"),
        ({"kind": ["all_of"]}, "p"),
        ({"kind": "quorum"}, "p.k"),
        ({"kind": "quorum", "k": "2"}, "p.k"),
        ({"kind": "quorum", "k": 2.0}, "p.k"),
        ({"kind": "quorum", "k": 1, "on_satisfied": "stop"}, "p.on_satisfied"),
        ({"kind": "any_of", "on_satisfied": None}, "p.on_satisfied"),
        (Quorum(0), "p.k"),
        (Quorum(-1), "p.k"),
        (Quorum(True), "p.k"),
        (Quorum(MAX_QUORUM + 1), "p.k"),
        (AnyOf([]), "p.on_satisfied"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_policy_is_refused_by_name(value: object, field: str) -> None:
    with pytest.raises(ff.InvalidInput) as refused:
        check_policy(value, "p")
    assert refused.value.field == field
