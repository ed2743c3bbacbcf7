"""The nodes of a flow, how they are joined, and what they mean as arguments of other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from flowfabric.client.submission import Submittable
from flowfabric.errors import InvalidInput
from flowfabric.values import conditions
from flowfabric.values.ids import ExecutionId
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum, policy_columns

if TYPE_CHECKING:
    from flowfabric.app.flow_builder import Flow

A = TypeVar("A")
R_co = TypeVar("R_co", covariant=True)
_SHOWN = 5  # nodes of a join in messages


class Node(Generic[R_co]):
    """One task of a flow. As an argument of another node it means its result."""

    __slots__ = ("execution_id", "flow", "name", "task")

    def __init__(
        self, flow: Flow, name: str, task: Submittable[R_co] | None, execution_id: ExecutionId | None = None
    ) -> None:
        self.flow = flow
        self.name = name
        self.task = task  # None if unknown
        self.execution_id = execution_id  # of a member that exists

    def __repr__(self) -> str:
        return f"<node {self.name} of {self.flow.name}>"

    def __bool__(self) -> bool:
        raise InvalidInput("is a node, whose result is not known yet", field=self.name, allowed="an argument of a node")

    __iter__ = None  # a node is one result; `flow.map` makes many nodes


class AnyNode(Node[Any]):
    """A node whose result has no type that checkers know: of a part, or of a flow that exists."""

    __slots__ = ()


class Join:
    """Several nodes, and how many of them have to succeed. As an argument it means their results.

    `all_of` and `quorum` give the list of the results of those that succeeded, `any_of` one result, `all_settled` the
    list of all outcomes.
    """

    __slots__ = ("nodes", "policy")

    def __init__(self, nodes: Sequence[Node[Any]], policy: EdgeGroupPolicy) -> None:
        self.nodes = tuple(nodes)
        self.policy = policy

    def __repr__(self) -> str:
        names = [node.name for node in self.nodes[:_SHOWN]]
        if len(self.nodes) > _SHOWN:
            names.append("...")
        if isinstance(self.policy, Quorum):
            names.insert(0, str(self.policy.k))
        kind, _, cancels = policy_columns(self.policy)
        if cancels:
            names.append("cancel_rest=True")
        return f"{kind}({', '.join(names)})"


class SubFlow(Mapping[str, AnyNode]):
    """The nodes of a flow that was included in another, by their names there. In `after` it means its last nodes."""

    def __init__(self, nodes: dict[str, AnyNode], ends: list[AnyNode]) -> None:
        self._nodes = nodes
        self.ends = ends

    def __getitem__(self, name: str) -> AnyNode:
        return self._nodes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


# An argument of a node: the value, or the node that gives it; or something with nodes in it, which is not checked.
Given: TypeAlias = A | Node[A]
Filled: TypeAlias = Join | AnyNode | list[Any] | tuple[Any, ...] | dict[str, Any]
Nodes = Node[Any] | SubFlow | Iterable[Node[Any] | SubFlow]
After = Nodes | Join


@overload
def all_of(*things: Nodes) -> Join: ...
@overload
def all_of(*things: conditions.Condition | str) -> conditions.AllMet: ...
def all_of(*things: Any) -> Any:
    """All of these: nodes of a flow, or conditions of a wait (a string means one signal on that key)."""
    nodes = nodes_in(things, "all_of")
    return conditions.all_of(*things) if nodes is None else Join(nodes, AllOf())


@overload
def any_of(*things: Nodes, cancel_rest: bool = False) -> Join: ...
@overload
def any_of(*things: str, n: int = 1, name: str | None = None) -> conditions.Count: ...
def any_of(*things: Any, n: int = 1, name: str | None = None, cancel_rest: bool = False) -> Any:
    """Any of these: nodes of a flow, of which one has to succeed, or keys of a wait, of which `n` have to be signalled.

    `cancel_rest` cancels the other nodes once one has succeeded.
    """
    nodes = nodes_in(things, "any_of")
    if nodes is None:
        if cancel_rest:
            raise InvalidInput("given for keys of a wait", field="cancel_rest", allowed="with nodes of a flow")
        return conditions.any_of(*things, n=n, name=name)
    if n != 1 or name is not None:
        field, allowed = ("n", f"ff.quorum({n!r}, ...)") if n != 1 else ("name", "flow.add(..., name=...)")
        raise InvalidInput("given for nodes", field=field, allowed=allowed)
    if not nodes:
        raise InvalidInput("got no nodes", field="any_of", allowed="one node or more")
    return Join(nodes, AnyOf(_rest(cancel_rest)))


def quorum(k: int, *nodes: Nodes, cancel_rest: bool = False) -> Join:
    """`k` of these nodes have to succeed. `cancel_rest` cancels the others then, or once success is impossible."""
    found = _only_nodes(nodes, "quorum", "nodes of a flow; for keys of a wait any_of(..., n=k)")
    if type(k) is not int or not 1 <= k <= len(found):
        allowed = f"1 to {len(found)}" if found else "nodes of a flow after it"
        raise InvalidInput(f"got {k!r} of {len(found)} nodes", field="k", allowed=allowed)
    return Join(found, Quorum(k, _rest(cancel_rest)))


def all_settled(*nodes: Nodes) -> Join:
    """All of these nodes have to end, whatever the result: with or without success, cancelled or skipped.

    As an argument it is the list of their outcomes in the order given, a `list[ff.Settled[T]]`.
    """
    return Join(_only_nodes(nodes, "all_settled", "nodes of a flow"), AllSettled())


def _only_nodes(things: tuple[Any, ...], what: str, allowed: str) -> list[Node[Any]]:
    found = nodes_in(things, what) if things else []
    if found is None:
        other = next(one for one in things if not isinstance(one, Node))
        raise InvalidInput(f"got {type(other).__name__}", field=what, allowed=allowed)
    return found


def _rest(cancel_rest: bool) -> OnSatisfied:
    return OnSatisfied.CANCEL_REMAINING if cancel_rest else OnSatisfied.LET_RUN


def nodes_in(things: Iterable[Any], what: str) -> list[Node[Any]] | None:
    """Return the nodes, each once, of nodes, sub-flows and lists of them; None for anything else."""
    found: dict[Node[Any], None] = {}
    others: list[object] = []
    is_for_flows = False
    for thing in things:
        is_list = isinstance(thing, Iterable) and not isinstance(thing, str | bytes | Mapping)
        is_for_flows = is_for_flows or is_list or isinstance(thing, Node | SubFlow)
        for one in thing if is_list else (thing,):
            if isinstance(one, Node):
                found[one] = None
            elif isinstance(one, SubFlow):
                found.update(dict.fromkeys(one.ends))
            elif isinstance(one, Join):
                raise InvalidInput(f"got {one} among others", field=what, allowed="nodes, or one join alone")
            elif is_list:
                raise InvalidInput(f"got {type(one).__name__} in a list", field=what, allowed="nodes of a flow")
            else:
                others.append(one)
    if others and is_for_flows:
        raise InvalidInput(f"got nodes and {type(others[0]).__name__}", field=what, allowed="only nodes")
    return list(found) if is_for_flows else None


def kept(after: After | None) -> After | None:
    """Return arguments that several nodes can use: a one-time iterator becomes a list."""
    return after if after is None or isinstance(after, Node | Join | Mapping | str) else list(after)


def joined(value: Any) -> Any:
    """Return the argument; a join of no nodes becomes an empty list."""
    return [] if isinstance(value, Join) and not value.nodes else value


def references(value: Any) -> Iterator[Node[Any]]:
    """Return the nodes in an argument."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Join):
        yield from value.nodes
    elif isinstance(value, list | tuple):
        for one in value:
            yield from references(one)
    elif isinstance(value, SubFlow):
        raise InvalidInput("a flow cannot be an argument", field="arguments", allowed='one of its nodes: sub["name"]')
    elif isinstance(value, dict):
        for key, one in value.items():
            for node in references(one):
                if not isinstance(key, str):
                    raise InvalidInput(f"{node!r} at {key!r}", field="arguments", allowed="dicts with text keys")
                yield node
    elif isinstance(value, set | frozenset) and any(isinstance(one, Node | Join) for one in value):
        raise InvalidInput("nodes in a set, which has no order", field="arguments", allowed="a list of nodes")


def joins_in(value: Any) -> Iterator[Join]:
    if isinstance(value, Join):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from joins_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from joins_in(one)


def place_of(value: Any, uuid_of: Any) -> list[Any]:
    """Return an argument as `node_arguments` stores it."""
    match value:
        case Node():
            return ["node", str(uuid_of(value))]
        case Join():
            kind = {AnyOf: "first", AllSettled: "settled"}.get(type(value.policy), "all")
            return [kind, [str(uuid_of(node)) for node in value.nodes]]
        case list() | tuple() if any(True for _ in references(value)):
            return ["list", [place_of(one, uuid_of) for one in value]]
        case dict() if any(True for _ in references(value)):
            return ["dict", {key: place_of(one, uuid_of) for key, one in value.items()}]
        case _:
            return ["value", value]
