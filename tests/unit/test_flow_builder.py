"""Flows as they are built: names, joins, arguments that are results of other nodes, and what is refused where."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.app.flow_builder import Flow
from flowfabric.app.flow_nodes import Join, Node
from flowfabric.app.sync_context import SyncContext
from flowfabric.client import node_arguments
from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.values import conditions
from flowfabric.values.attempt import Passed
from flowfabric.values.graph import NewNode
from flowfabric.values.ids import ExecutionId, FlowId
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, OnSatisfied, Quorum
from flowfabric.values.state import State
from tests.ids import home, id_in

FLOW = FlowId(UUID(int=7))
SEED = UUID(int=8)
app = ff.App("postgresql://nobody@nowhere/nothing", namespace="shop")


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Order:
    number: int
    lines: list[int]


@app.task
def double(n: int) -> int:
    return 2 * n


@app.task
def total(ns: list[int], extra: int = 0) -> int:
    return sum(ns) + extra


@app.task
async def anything(value: Any = None) -> Any:
    return value


@app.task
def greet(name: str, after: str = "") -> str:
    return name + after


@app.task
def label(*, name: str) -> str:
    return name


@app.task
def pair(both: Pair) -> int:
    return both.left


@app.task
def ship(order: Order, on: date | None = None) -> None: ...


@pytest.fixture
def flow() -> Flow:
    return app.flow("night")


def built(flow: Flow) -> dict[str, NewNode]:
    return {node.name: node for node in flow.build(flow.ids(FLOW, 8, SEED))}


def after(flow: Flow) -> dict[str, list[Any]]:
    return {name: [edge.upstream for edge in node.after] for name, node in built(flow).items()}


def filled(flow: Flow, name: str, results: dict[str, Any]) -> Any:
    """The arguments a node is called with when those nodes have succeeded with these results."""
    nodes = built(flow)
    inputs = {
        nodes[one].execution.execution_id: Passed(State.COMPLETED, msgspec.json.encode(value), None)
        for one, value in results.items()
    }
    return msgspec.json.decode(node_arguments.fill(nodes[name].execution.input_payload, inputs, Codecs()))


def refused(match: str) -> Any:
    return pytest.raises(ff.InvalidInput, match=match.replace("^", "^invalid_input: ", 1))


# ---- names


def test_nodes_are_named_by_their_tasks_and_numbered(flow: Flow) -> None:
    for task, name in ((double, None), (total, "sum"), (double, None), (double, "double-4"), (double, None)):
        flow.add(task, [] if task is total else 1, name=name)
    flow.add(double, 1)
    assert list(flow.nodes) == ["double", "sum", "double-2", "double-4", "double-3", "double-5"]
    assert len(flow) == 6
    assert repr(flow) == "<flow night: 6 nodes>"
    assert repr(flow.nodes["sum"]) == "<node sum of night>"


def test_a_node_that_is_refused_leaves_nothing_behind(flow: Flow) -> None:
    with refused("^n: "):
        flow.add(double, "one")
    other = app.flow("other").add(double, 1)
    with refused("another flow"):
        flow.add(double, other)
    assert len(flow) == 0
    assert flow.add(double, 1).name == "double"


def test_names_are_checked(flow: Flow) -> None:
    flow.add(double, 1, name="one")
    with refused("^name: 'one' is already a node; allowed: a unique name"):
        flow.add(double, 2, name="one")
    for make in (
        lambda: flow.add(double, 2, name=""),
        lambda: flow.map(double, [2], name=""),
        lambda: flow.include(app.flow("other"), name=""),
    ):
        with refused("^name: is empty"):
            make()
    with refused("^name: "):
        flow.add(double, 2, name="x" * 300)
    assert list(flow.nodes) == ["one"]


def test_a_flow_has_the_namespace_of_its_app_and_tags() -> None:
    flow = app.flow("night", tags={"team.owner": "a"})
    assert (flow.name, flow.namespace, flow.tags) == ("night", "shop", {"team.owner": "a"})
    assert app.flow("night", namespace="").namespace == ""
    with refused("^tags"):
        app.flow(
            "night",
            tags={"owner": 5},
        )
    with refused("^name"):
        app.flow("x" * 300)


def test_tasks_may_have_parameters_called_name_and_after(flow: Flow) -> None:
    first = flow.add(greet, name="ann", after="!")
    assert first.name == "greet"
    assert msgspec.json.decode(built(flow)["greet"].execution.input_payload) == {"name": "ann", "after": "!"}
    flow.add(greet, "bob", "?", name="second", after=first)
    assert after(flow)["second"] == ["greet"]
    assert msgspec.json.decode(built(flow)["second"].execution.input_payload) == {"name": "bob", "after": "?"}
    assert flow.add(greet, "bob", after=first).name == "greet-2"
    assert filled(flow, "greet-2", {"greet": "hi"}) == {"name": "bob", "after": "hi"}
    assert flow.add(label, name="x").name == "label"
    assert [node.name for node in flow.map(greet, ["a", "b"], name="many", after=first)] == ["many", "many-2"]
    assert after(flow)["many-2"] == ["greet"]


# ---- joins


def test_a_node_comes_after_its_arguments_and_after(flow: Flow) -> None:
    a, b, c = (flow.add(double, n, name=name) for n, name in enumerate("abc"))
    flow.add(total, [a, 1, b], a, name="args")
    flow.add(double, a, after=b, name="both")
    flow.add(double, 1, after=[a, b], name="list")
    flow.add(double, 1, after=(one for one in (c, c)), name="once")
    flow.add(double, 1, after=ff.all_of(a, [b, c]), name="all")
    flow.add(double, c, after=ff.all_of(a), name="all and one")
    assert after(flow) == {
        "a": [], "b": [], "c": [], "args": ["a", "b"], "both": ["a", "b"], "list": ["a", "b"], "once": ["c"],
        "all": ["a", "b", "c"], "all and one": ["c", "a"],
    }  # fmt: skip
    nodes = built(flow)
    assert all(node.policy == AllOf() for node in nodes.values())
    assert [edge.passes_result for edge in nodes["both"].after] == [True, False]
    assert [edge.passes_result for edge in nodes["all and one"].after] == [True, False]


def test_joins_of_some(flow: Flow) -> None:
    a, b, c = (flow.add(double, n, name=name) for n, name in enumerate("abc"))
    flow.add(double, ff.any_of(a, b), name="any")
    flow.add(double, 1, after=ff.any_of([a, b], c, cancel_rest=True), name="race")
    flow.add(total, ff.quorum(2, [a, b, c]), name="most")
    flow.add(total, ff.quorum(1, a, b, cancel_rest=True), name="one")
    flow.add(anything, ff.all_settled(a, [b, c]), name="ended")
    flow.add(anything, [a, b], after=ff.any_of(a, b, c), name="shown")
    policies = {name: node.policy for name, node in built(flow).items()}
    assert policies["any"] == AnyOf(OnSatisfied.LET_RUN)
    assert policies["race"] == AnyOf(OnSatisfied.CANCEL_REMAINING)
    assert policies["most"] == Quorum(2, OnSatisfied.LET_RUN)
    assert policies["one"] == Quorum(1, OnSatisfied.CANCEL_REMAINING)
    assert policies["ended"] == AllSettled()
    assert after(flow)["race"] == ["a", "b", "c"]
    assert after(flow)["shown"] == ["a", "b", "c"]
    assert [edge.passes_result for edge in built(flow)["shown"].after] == [True, True, False]


def test_the_same_node_counts_once(flow: Flow) -> None:
    a, b = flow.add(double, 1), flow.add(double, 2)
    assert ff.any_of(a, [a, b]).nodes == (a, b)
    with refused("^k: got 2 of 1 nodes; allowed: 1 to 1"):
        ff.quorum(2, a, a)


def test_joins_of_nothing(flow: Flow) -> None:
    assert flow.add(double, 1, after=[]).name == "double"
    assert flow.add(double, 1, after=ff.all_of([])).name == "double-2"
    assert flow.add(double, 1, after=flow.include(app.flow("empty"))).name == "double-3"
    assert flow.add(double, 1, after=ff.all_settled([])).name == "double-4"
    flow.add(total, ff.all_of([]))
    flow.add(total, ff.all_settled())
    flow.add(total, [])
    assert set(map(tuple, after(flow).values())) == {()}
    assert built(flow)["total"].execution.input_payload == built(flow)["total-2"].execution.input_payload
    with refused("^any_of: got no nodes"):
        ff.any_of([])
    with refused("^k: got 1 of 0 nodes"):
        ff.quorum(1, [])
    with refused("^k: got 1 of 0 nodes"):
        ff.quorum(1)


@pytest.mark.parametrize("k", [0, 3, -1, True, 1.0, "2"])
def test_a_quorum_is_of_its_nodes(flow: Flow, k: Any) -> None:
    a, b = flow.add(double, 1), flow.add(double, 2)
    with refused(f"^k: got {re.escape(repr(k))} of 2 nodes; allowed: 1 to 2$"):
        ff.quorum(k, a, b)


def test_one_any_of_or_quorum_for_a_node(flow: Flow) -> None:
    a, b, c = (flow.add(double, n, name=name) for n, name in enumerate("abc"))
    some = ff.any_of(a, b)
    for make in (
        lambda: flow.add(double, c, after=some),
        lambda: flow.add(total, some, c),
        lambda: flow.add(total, ff.quorum(2, a, b), some),
        lambda: flow.add(anything, ff.all_settled(a, b), after=c),
        lambda: flow.add(total, ff.quorum(1, a, b), after=ff.any_of(b, c)),
        lambda: flow.add(total, some, ff.any_of(a, b, cancel_rest=True)),
        lambda: flow.add(double, some, after=ff.all_of(a, c)),
    ):
        with refused("^after: .* comes after .* and also after others; allowed: one any_of, quorum or all_settled"):
            make()
    assert flow.add(anything, [some, some], after=ff.all_of(a)).name == "anything"


def test_the_error_names_an_argument_that_cannot_be_joined(flow: Flow) -> None:
    a, b = flow.add(double, 1), flow.add(double, 2)
    some: Any = ff.any_of(a, b)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: ff.all_of(a, "key"), "all_of: got nodes and str; allowed: only nodes"),
        (lambda: ff.any_of("key", a), "any_of: got nodes and str; allowed: only nodes"),
        (lambda: ff.all_of([a, 1]), "all_of: got int in a list; allowed: nodes of a flow"),
        (lambda: ff.all_of(a, some), "all_of: got any_of(double, double-2) among others; allowed: nodes"),
        (lambda: ff.all_of(["key"]), "all_of: got str in a list; allowed: nodes of a flow"),
        (lambda: ff.quorum(1, "a"), "quorum: got str; allowed: nodes of a flow; for keys of a wait any_of(..., n=k)"),
        (lambda: ff.all_settled("a"), "all_settled: got str; allowed: nodes of a flow"),
        (lambda: ff.any_of(a, b, n=2), "n: given for nodes; allowed: ff.quorum(2, ...)"),
        (lambda: ff.any_of(a, b, name="x"), "name: given for nodes; allowed: flow.add(..., name=...)"),
        (lambda: ff.any_of("a", "b", cancel_rest=True), "cancel_rest: given for keys of a wait"),
        (lambda: flow.add(double, 1, after="double"), "after: got str; allowed: nodes, all_of, any_of, quorum"),
        (lambda: flow.add(double, 1, after=["double"]), "after: got str in a list; allowed: nodes of a flow"),
        (lambda: flow.add(double, 1, after=[a, some]), "after: got any_of(double, double-2) among"),
        (lambda: flow.add(double, 1, after=ff.on("key")), "after: got Single; allowed: nodes, all_of"),
        (lambda: flow.add(double, 1, after=flow), "after: got Flow; allowed: nodes, all_of"),
    ]
    for make, message in cases:
        with refused("^" + re.escape(message)):
            make()


def test_conditions_of_waits_are_made_as_before() -> None:
    assert ff.all_of("a", ff.on("b")) == conditions.all_of("a", ff.on("b"))
    assert ff.any_of("a", "b", n=2, name="x") == conditions.any_of("a", "b", n=2, name="x")
    assert ff.all_of() == conditions.all_of()


def test_nodes_of_other_flows_are_refused(flow: Flow) -> None:
    other = app.flow("other").add(double, 1)
    for make in (
        lambda: flow.add(double, other),
        lambda: flow.add(double, 1, after=other),
        lambda: flow.add(total, ff.quorum(1, other)),
        lambda: flow.add(anything, {"deep": [other]}),
        lambda: flow.map(double, [1], after=[other]),
    ):
        with refused("^after: <node double of other> belongs to another flow; allowed: nodes of <flow night"):
            make()
    with refused("^after: <node lost of night> was not added"):
        flow.add(double, Node(flow, "lost", double))


# ---- arguments


def test_a_node_is_one_thing_whose_result_is_not_known(flow: Flow) -> None:
    node: Any = flow.add(double, 1)
    with refused("^double: is a node, whose result is not known yet"):
        bool(node)
    with pytest.raises(TypeError, match="not iterable"):
        list(node)
    with refused("^items: got Node; allowed: a list; the result of a node is not known yet"):
        flow.map(double, node)


def test_wrong_arguments_are_named_where_they_are_written(flow: Flow) -> None:
    node = flow.add(double, 1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: flow.add(double), "n: is missing"),
        (lambda: flow.add(double, 1, 2), "arguments: 2 positional arguments given to double"),
        (lambda: flow.add(double, "1"), "n: "),
        (lambda: flow.add(double, node, n=2), "n: is given twice"),
        (lambda: flow.add(total, [node], extra="x"), "extra: "),
        (lambda: flow.add(double, 1, nn=2), "nn: "),
        (lambda: flow.add(double, 1, priority="high"), "priority: "),
        (lambda: flow.add(double, 1, idempotency_key="k"), "idempotency_key: given for a node"),
        (lambda: flow.add(double.options(idempotency_key="k"), 1), "idempotency_key: given for a node"),
        (lambda: flow.add(len, "abc"), "task: got builtin_function_or_method; allowed: a task"),
        (lambda: flow.add("double", 1), "task: got str; allowed: a task"),
        (lambda: flow.map("double", [1]), "task: got str; allowed: a task"),
        (lambda: flow.add(anything, {node}), "arguments: nodes in a set, which has no order; allowed: a list"),
        (lambda: flow.add(anything, {1: [node]}), "arguments: <node double of night> at 1; allowed: dicts with text"),
        (lambda: flow.add(anything, flow.include(app.flow("x"))), "arguments: a flow cannot be an argument"),
        (lambda: flow.map(double, [1, 2, "3"]), "items[2].n: "),
        (lambda: flow.map(double, [1, (2, 3)]), "items[1].arguments: 2 positional arguments"),
        (lambda: flow.map(double, 3), "items: got int"),
        (lambda: flow.map(double, "123"), "items: got str"),
        (lambda: flow.map(total, [[1]], extra="x"), "extra: "),
        (lambda: flow.map(double, flow.include(app.flow("x"))), "items: got SubFlow"),
    ]
    for make, message in cases:
        with refused("^" + re.escape(message)):
            make()


def test_a_node_inside_an_object_is_named(flow: Flow) -> None:
    node: Any = flow.add(double, 1)
    with refused("^order"):
        flow.add(ship, Order(node, []))
    with refused("^value"):
        flow.add(anything, Order(node, []))


def test_options_of_nodes(flow: Flow) -> None:
    flow.add(double, 1, priority=7, lane="slow", delay=timedelta(minutes=1), tags={"team.owner": "a"})
    flow.add(double.options(priority=3), 1)
    first, second = (built(flow)[name].execution for name in ("double", "double-2"))
    assert (first.priority, first.lane_id, first.namespace) == (7, "slow", "shop")
    assert first.tags == {"team.owner": "a"}
    assert first.delay_until == timedelta(minutes=1)
    assert second.priority == 3


def test_arguments_that_are_results(flow: Flow) -> None:
    a, b, c = (flow.add(double, n, name=name) for n, name in enumerate("abc"))
    results = {"a": 1, "b": [2], "c": None}
    cases: list[tuple[Any, Any]] = [
        (a, 1),
        (c, None),
        ([a, b], [1, [2]]),
        ((a, 5, c), [1, 5, None]),
        ({"x": a, "y": {"z": [b, {"w": c}]}, "plain": date(2030, 1, 2)}, {
            "x": 1, "y": {"z": [[2], {"w": None}]}, "plain": "2030-01-02"}),
        (ff.all_of(a, b), [1, [2]]),
        ([ff.all_of(a, b), a], [[1, [2]], 1]),
        (Pair(a, b), [1, [2]]),
    ]  # fmt: skip
    for place, (value, meant) in enumerate(cases):
        flow.add(anything, value, name=f"take {place}")
        assert filled(flow, f"take {place}", results) == {"value": meant}
    flow.add(anything, ff.any_of(a, b), name="any")
    assert filled(flow, "any", {"b": [2]}) == {"value": [2]}
    assert filled(flow, "any", results) == {"value": 1}
    flow.add(total, ff.quorum(1, a, b, c), 4, name="some")
    assert filled(flow, "some", {"c": 3, "a": 1}) == {"ns": [1, 3], "extra": 4}


def test_what_did_not_succeed_is_left_out_of_lists_and_null_elsewhere(flow: Flow) -> None:
    a, b, c = (flow.add(double, n, name=name) for n, name in enumerate("abc"))
    flow.add(anything, {"one": a, "list": [a, b], "dict": {"a": a, "b": b}}, after=ff.any_of(a, b, c), name="x")
    assert filled(flow, "x", {"b": 2}) == {"value": {"list": [2], "dict": {"b": 2}}}
    flow.add(greet, a, b, after=ff.any_of(a, b), name="y")
    assert filled(flow, "y", {"b": 2}) == {"name": None, "after": 2}
    nodes = built(flow)
    # Only successes are passed: one that has no result now was replayed since.
    inputs = {nodes["a"].execution.execution_id: Passed(State.WAITING, None, None)}
    with pytest.raises(CannotDecode, match="that node was replayed"):
        node_arguments.fill(nodes["x"].execution.input_payload, inputs, Codecs())


def test_payloads_that_are_not_of_a_node_are_refused() -> None:
    for data, words in (
        (b"[]", "not the arguments of a node"),
        (b'{"n":1}', "not the arguments of a node"),
        (b"{", "not the arguments of a node"),
        (b'{"given":{},"wanted":{"n":["moon",1]}}', "refers to an unknown place"),
        (b'{"given":{},"wanted":{"n":["node","no id"]}}', "refers to an unknown place"),
        (b'{"given":{},"wanted":{"n":["all",[7]]}}', "refers to an unknown place"),
        (b'{"given":{},"wanted":{"n":7}}', "refers to an unknown place"),
    ):
        with pytest.raises(CannotDecode, match=words):
            node_arguments.fill(data, {}, Codecs())


class _Taken:
    """Hands out values as nodes do, and knows what is to be passed for them."""

    def __init__(self) -> None:
        self.flow = app.flow("any")
        self.results: dict[str, Any] = {}

    def node(self, value: Any, succeeds: bool) -> Node[Any]:
        node = self.flow.add(anything)
        if succeeds:
            self.results[node.name] = value
        return node


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_ABSENT = object()


def _shapes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.tuples(st.just("list"), st.lists(inner, max_size=4))
        | st.tuples(st.just("tuple"), st.lists(inner, max_size=4))
        | st.tuples(st.just("dict"), st.dictionaries(st.text(), inner, max_size=4))
    )


_leaf = st.tuples(st.just("value"), _plain) | st.tuples(st.just("node"), st.tuples(_plain, st.booleans()))
_join = st.tuples(st.just("all"), st.lists(st.tuples(_plain, st.booleans()), min_size=1, max_size=3))


@given(st.recursive(_leaf | _join, _shapes, max_leaves=12))
def test_every_placeholder_is_filled_with_the_passed_result(shape: Any) -> None:
    taken = _Taken()

    def make(shape: Any) -> tuple[Any, Any]:
        """The argument, and what the handler must get for it."""
        kind, inner = shape
        match kind:
            case "value":
                return inner, inner
            case "node":
                value, succeeds = inner
                return taken.node(value, succeeds), value if succeeds else _ABSENT
            case "all":
                nodes = [taken.node(*one) for one in inner]
                return ff.all_of(nodes), [value for value, succeeds in inner if succeeds]
            case "dict":
                made = {key: make(one) for key, one in inner.items()}
                argument = {key: one for key, (one, _) in made.items()}
                return argument, {key: meant for key, (_, meant) in made.items() if meant is not _ABSENT}
            case _:
                both = [make(one) for one in inner]
                values: Any = [one for one, _ in both]
                return tuple(values) if kind == "tuple" else values, [one for _, one in both if one is not _ABSENT]

    argument, meant = make(shape)
    before = set(taken.flow.nodes)
    node = taken.flow.add(anything, argument)
    if not before:  # nothing of it comes from nodes
        payload = built(taken.flow)[node.name].execution.input_payload
        assert msgspec.json.decode(payload) == {"value": meant}
        return
    assert filled(taken.flow, node.name, taken.results) == {"value": None if meant is _ABSENT else meant}


# ---- map, include


def test_map_adds_one_node_per_item(flow: Flow) -> None:
    first = flow.add(double, 1)
    nodes = flow.map(total, [([1], 2), [3], first, ([first, 4],)], after=(one for one in [first]), name="part")
    assert [node.name for node in nodes] == ["part", "part-2", "part-3", "part-4"]
    assert all(names == ["double"] for names in list(after(flow).values())[1:])
    assert msgspec.json.decode(built(flow)["part"].execution.input_payload) == {"ns": [1], "extra": 2}
    assert filled(flow, "part-4", {"double": 9}) == {"ns": [9, 4]}
    assert [node.name for node in flow.map(total, [[1]], extra=5, priority=3)] == ["total"]
    assert built(flow)["total"].execution.priority == 3
    assert flow.map(double, []) == []
    assert [node.name for node in flow.map(double, range(2))] == ["double-2", "double-3"]


def test_a_flow_is_copied_into_another(flow: Flow) -> None:
    inner = app.flow("inner")
    a, b = inner.map(double, [1, 2], name="part")
    inner.add(total, [a, b], name="sum")
    inner.add(anything, {"x": (a, Pair(1, b))}, after=ff.any_of(a, b, cancel_rest=True), name="race")
    first, last = flow.add(double, 0, name="first"), flow.add(double, 9, name="other")
    sub = flow.include(inner, after=(one for one in (first, last)))
    again = flow.include(inner, after=sub)
    named = flow.include(inner, name="mine", after=[again, first])
    flow.add(double, sub["sum"], after=named, name="end")
    assert after(flow) == {
        "first": [], "other": [],
        "inner.part": ["first", "other"], "inner.part-2": ["first", "other"],
        "inner.sum": ["inner.part", "inner.part-2"], "inner.race": ["inner.part", "inner.part-2"],
        "inner-2.part": ["inner.sum", "inner.race"], "inner-2.part-2": ["inner.sum", "inner.race"],
        "inner-2.sum": ["inner-2.part", "inner-2.part-2"], "inner-2.race": ["inner-2.part", "inner-2.part-2"],
        "mine.part": ["inner-2.sum", "inner-2.race", "first"], "mine.part-2": ["inner-2.sum", "inner-2.race", "first"],
        "mine.sum": ["mine.part", "mine.part-2"], "mine.race": ["mine.part", "mine.part-2"],
        "end": ["inner.sum", "mine.sum", "mine.race"],
    }  # fmt: skip
    assert list(sub) == ["part", "part-2", "sum", "race"]
    assert [node.name for node in sub.ends] == ["inner.sum", "inner.race"]
    assert built(flow)["mine.race"].policy == AnyOf(OnSatisfied.CANCEL_REMAINING)
    assert filled(flow, "mine.race", {"mine.part": 1, "mine.part-2": 2}) == {"value": {"x": [1, [1, 2]]}}
    assert filled(flow, "inner-2.sum", {"inner-2.part": 3, "inner-2.part-2": 4}) == {"ns": [3, 4]}
    assert len(inner) == 4
    inner.add(double, 5)
    assert len(sub) == 4, "a copy, which stays as it was"


def test_flows_that_cannot_be_included(flow: Flow) -> None:
    grows = Flow(app, "grows", grows=FLOW, here=id_in(1, UUID(int=1)))
    for other in (flow, grows, None, "inner"):
        with refused("^other: got .*; allowed: another flow, made by app.flow"):
            flow.include(other)


# ---- growth


def test_a_flow_that_grows_knows_its_members() -> None:
    here, other = (ExecutionId(UUID(int=(n << 16) + home(FLOW, 8))) for n in (1, 2))
    flow = Flow(app, "grower", grows=FLOW, here=here)
    first = flow.member(other)
    assert first is flow.member(str(other))
    assert flow.member(here) is flow.here
    flow.add(total, [first, flow.here], after=[first, flow.here])
    assert after(flow) == {"total": [other, here]}
    with refused("^execution_id"):
        flow.member("no id")
    with refused("^flow: its nodes were already added; allowed: another ctx.flow"):
        built(flow)


def test_a_new_flow_has_no_members_yet(flow: Flow) -> None:
    with refused("^here: this flow was not made in a task; allowed: a flow from ctx.flow"):
        _ = flow.here
    with refused("^member: the flow does not exist yet"):
        flow.member(id_in(1, UUID(int=1)))


async def test_a_key_is_for_new_flows() -> None:
    flow = Flow(app, "grower", grows=FLOW, here=id_in(1, UUID(int=1)))
    with refused("^idempotency_key: given for a flow that grows"):
        await flow.submit(idempotency_key="k")
    with refused("^idempotency_key"):
        await app.flow("x").submit(idempotency_key=7)


def test_only_members_of_flows_have_one_to_add_to() -> None:
    class Scope:
        class claimed:
            flow_id = None
            execution_kind = "double"

    with refused("^ctx.flow: double was not submitted in a flow; allowed: app.flow"):
        SyncContext(Scope()).flow()


# ---- what the engine is given


def test_a_seed_makes_the_same_of_the_same(flow: Flow) -> None:
    a = flow.add(double, 1)
    flow.add(double, a, after=flow.map(double, [2, 3]))
    ids = flow.ids(FLOW, 8, SEED)
    assert list(ids) == ["double", "double-2", "double-3", "double-4"]
    assert ids == flow.ids(FLOW, 8, SEED)
    assert len(set(ids.values())) == 4
    assert {home(one, 8) for one in ids.values()} == {home(FLOW, 8)}
    assert set(flow.ids(FLOW, 8, UUID(int=9)).values()).isdisjoint(ids.values())
    assert set(flow.ids(FLOW, 8).values()).isdisjoint(flow.ids(FLOW, 8).values())
    assert flow.build(ids) == flow.build(ids)
    assert {name: node.execution.execution_id for name, node in built(flow).items()} == ids


def test_a_key_identifies_one_flow_of_a_name_and_namespace(flow: Flow) -> None:
    ids = {
        flow.id_of("a"), app.flow("night").id_of("a"), flow.id_of("b"), app.flow("day").id_of("a"),
        app.flow("night", namespace="").id_of("a"),
    }  # fmt: skip
    assert len(ids) == 4


def test_a_join_says_what_it_is(flow: Flow) -> None:
    nodes = flow.map(double, range(6), name="n")
    assert isinstance(ff.all_of(nodes), Join)
    assert repr(ff.all_of(nodes[:2])) == "all_of(n, n-2)"
    assert repr(ff.any_of(nodes, cancel_rest=True)) == "any_of(n, n-2, n-3, n-4, n-5, ..., cancel_rest=True)"
    assert repr(ff.quorum(2, nodes[:5])) == "quorum(2, n, n-2, n-3, n-4, n-5)"
    assert repr(ff.all_settled(nodes[:2])) == "all_settled(n, n-2)"
