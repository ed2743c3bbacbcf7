"""Flows in Python: nodes are tasks with arguments, arguments may be other nodes, joins say which of them are needed.

    flow = app.flow("race")
    answers = [flow.add(ask, model) for model in models]
    flow.add(judge, ff.quorum(2, answers, cancel_rest=True))
    run = await flow.submit()
    results = await run.result()

A flow is built here and stored as a whole when it is submitted. Mistakes raise in the line that makes them.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload
from uuid import UUID, uuid5

import msgspec

from flowfabric.app.flow_nodes import (
    After,
    AnyNode,
    Filled,
    Given,
    Join,
    Node,
    SubFlow,
    joined,
    joins_in,
    kept,
    nodes_in,
    place_of,
    references,
)
from flowfabric.bridges._submission import AsyncConnection, SyncConnection
from flowfabric.client import node_arguments
from flowfabric.client.flow_run import FlowRun
from flowfabric.client.in_transaction import submit_flow_in
from flowfabric.client.limits import flow_kind
from flowfabric.client.submission import Submission, Submittable, TypedTask, check_task, new_submission
from flowfabric.contracts.json_types import ENCODER
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_key, check_tags, check_text
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import (
    ExecutionId,
    FlowId,
    fit_partition,
    mint_execution_id,
    parse_execution_id,
    partition_of_id,
)
from flowfabric.values.joins import AllOf
from flowfabric.values.spending import Budget

if TYPE_CHECKING:
    from flowfabric.client.connector import Connector

A = TypeVar("A")
B = TypeVar("B")
Q = ParamSpec("Q")
R = TypeVar("R")
KEYS = UUID("a2c9b1f0-5d1e-5f6b-9a55-6f0f7c3b7e21")  # the namespace of flow ids made from idempotency keys


class _Entry:
    """A node to create: its task, arguments and upstreams."""

    __slots__ = ("given", "join", "node", "submission", "wanted")

    def __init__(self, node: Node[Any], submission: Submission, join: Join | None) -> None:
        self.node = node
        self.submission = submission
        self.join = join
        signature = submission.task.signature
        bound = {name: joined(value) for name, value in signature.bind(submission.args, submission.kwargs).items()}
        self.wanted = {name: value for name, value in bound.items() if any(True for _ in references(value))}
        # A wrong argument fails here. Results of other nodes are checked when they are known.
        plain = {name: value for name, value in bound.items() if name not in self.wanted}
        self.given = signature.check(plain, self.wanted)


class Flow:
    """A graph of tasks, submitted as a whole: `app.flow("name")`. In a running task `ctx.flow()` adds to its own."""

    def __init__(
        self,
        app: Connector,
        name: str,
        *,
        namespace: str = "",
        tags: Mapping[str, str] | None = None,
        budget: Budget | None = None,
        grows: FlowId | None = None,
        here: ExecutionId | None = None,
    ) -> None:
        self._app = app
        self.name = check_text(name, "name")
        self.namespace = check_text(namespace, "namespace")
        self.tags = check_tags(tags)
        if budget is not None and not isinstance(budget, Budget):
            raise InvalidInput(f"got {type(budget).__name__}", field="budget", allowed="an ff.Budget or None")
        self.budget = budget
        self.grows = grows
        self._entries: dict[str, _Entry] = {}
        self._counts: dict[str, int] = {}
        self._here: AnyNode | None = None if here is None else AnyNode(self, "here", None, here)
        self._old: dict[str, AnyNode] = {} if self._here is None else {str(here): self._here}
        self._is_built = False

    def __repr__(self) -> str:
        return f"<flow {self.name}: {len(self._entries)} nodes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nodes(self) -> dict[str, Node[Any]]:
        """The added nodes, by name."""
        return {name: entry.node for name, entry in self._entries.items()}

    @property
    def here(self) -> AnyNode:
        """In a flow from `ctx.flow()`: the running task itself."""
        if self._here is None:
            raise InvalidInput("this flow was not made in a task", field="here", allowed="a flow from ctx.flow()")
        return self._here

    def member(self, execution_id: str | ExecutionId, name: str = "") -> AnyNode:
        """Return an existing node of the flow, for new nodes to come after or to use its result."""
        if self.grows is None:
            raise InvalidInput("the flow does not exist yet", field="member", allowed="the node that `add` returned")
        found = parse_execution_id(execution_id)
        return self._old.setdefault(str(found), AnyNode(self, name or str(found), None, found))

    @overload
    def add(
        self, task: Submittable[R], /, *, after: After | None = None, name: str | None = None, **kwargs: Any
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Submittable[R],
        a: Filled,
        /,
        *,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: TypedTask[Concatenate[A, Q], R],
        a: Given[A],
        /,
        *,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: Submittable[R],
        a: Filled,
        b: Filled,
        /,
        *more: Any,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: TypedTask[Concatenate[Any, B, Q], R],
        a: Filled,
        b: Given[B],
        /,
        *more: Any,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: TypedTask[Concatenate[A, Any, Q], R],
        a: Given[A],
        b: Filled,
        /,
        *more: Any,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node[R]: ...
    @overload
    def add(
        self,
        task: TypedTask[Concatenate[A, B, Q], R],
        a: Given[A],
        b: Given[B],
        /,
        *more: Any,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node[R]: ...
    def add(
        self,
        task: Submittable[Any],
        /,
        *args: Any,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node[Any]:
        """Add a task with these arguments. Nodes among them (also in lists, dicts and joins) mean their results.

        It comes after those nodes, all of which have to succeed, and after `after`. `name` is its name in the flow; by
        default the task's name, numbered from the second on. Keywords that name an option and no parameter of the task
        are options, as in `submit`. If the task has a parameter `name` or `after` that is not given by position, the
        keyword is that argument.
        """
        check_task(task)
        free = [each.name for each in task.signature.parameters if each.is_keyword_only]
        free += [each.name for each in task.signature.parameters if not each.is_keyword_only][len(args) :]
        if after is not None and "after" in free:
            kwargs["after"], after = after, None
        if name is not None and "name" in free:
            kwargs["name"], name = name, None
        return self._add(task, args, kwargs, after, name)

    def _add(
        self,
        task: Submittable[R],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        after: After | None,
        name: str | None,
    ) -> Node[R]:
        submission = new_submission(task, args, kwargs)
        if submission.options.idempotency_key:
            raise InvalidInput("given for a node", field="idempotency_key", allowed="flow.submit(idempotency_key=...)")
        node: Node[R] = Node(self, name or task.name, task)
        entry = _Entry(node, submission, None)
        entry.join = self._join(entry, after)
        node.name = self._name(name, task.name)  # last: a refused node uses up no number
        self._entries[node.name] = entry
        return node

    @overload
    def map(
        self,
        task: TypedTask[Concatenate[A, Q], R],
        items: Iterable[A] | Iterable[Node[A]],
        /,
        *,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> list[Node[R]]: ...
    @overload
    def map(
        self,
        task: Submittable[R],
        items: Iterable[Filled],
        /,
        *,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> list[Node[R]]: ...
    def map(
        self,
        task: Submittable[Any],
        items: Iterable[Any],
        /,
        *,
        after: After | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> list[Node[Any]]:
        """Add a task once per item: a tuple is its arguments, anything else (a node too) its one argument."""
        check_task(task)
        if isinstance(items, Node | str | bytes | SubFlow) or not isinstance(items, Iterable):
            raise InvalidInput(
                f"got {type(items).__name__}",
                field="items",
                allowed="a list; the result of a node is not known yet: add nodes from inside a task, with ctx.flow()",
            )
        title = task.name if name is None else _title(name)
        after = kept(after)
        made: list[Node[Any]] = []
        for place, item in enumerate(items):
            args = item if isinstance(item, tuple) else (item,)
            try:
                made.append(self._add(task, args, kwargs, after, self._next(title)))
            except InvalidInput as error:
                if error.field is None or error.field in ("after", *kwargs):
                    raise
                raise InvalidInput(
                    error.problem, field=f"items[{place}].{error.field}", allowed=error.allowed
                ) from None
        return made

    def include(self, other: Flow, *, after: After | None = None, name: str | None = None) -> SubFlow:
        """Copy another flow into this one, with its nodes named `name.node`; its first nodes come after `after`."""
        if not isinstance(other, Flow) or other is self or other.grows is not None:
            raise InvalidInput(f"got {other!r}", field="other", allowed="another flow, made by app.flow()")
        title = self._next(_title(other.name if name is None else name))
        after = kept(after)
        made: dict[str, AnyNode] = {}
        ends = dict.fromkeys(other._entries)
        for entry in other._entries.values():
            if entry.join is not None:
                for upstream in entry.join.nodes:
                    ends.pop(upstream.name, None)

        def here(value: Any) -> Any:
            match value:
                case Node():
                    return made[value.name]
                case Join():
                    return Join([made[node.name] for node in value.nodes], value.policy)
                case list() | tuple() if any(True for _ in references(value)):
                    return [here(one) for one in value]
                case dict() if any(True for _ in references(value)):
                    return {key: here(one) for key, one in value.items()}
                case _:
                    return value

        for inner, entry in other._entries.items():
            submission = entry.submission.replace(
                args=tuple(here(one) for one in entry.submission.args),
                kwargs={key: here(one) for key, one in entry.submission.kwargs.items()},
            )
            node = AnyNode(self, self._name(f"{title}.{inner}", inner), entry.submission.task)
            copy = _Entry(node, submission, None)
            copy.join = here(entry.join) if entry.join is not None else self._join(copy, after)
            self._entries[node.name] = copy
            made[inner] = node
        return SubFlow(made, [made[one] for one in ends])

    def _next(self, title: str) -> str:
        """Return the title, numbered unless it is the first one."""
        count = self._counts.get(title, 0)
        while True:
            count += 1
            found = title if count == 1 else f"{title}-{count}"
            if found not in self._entries:
                self._counts[title] = count
                return found

    def _name(self, given: str | None, title: str) -> str:
        if given is None:
            return self._next(title)
        if _title(given) in self._entries:
            raise InvalidInput(f"{given!r} is already a node", field="name", allowed="a unique name")
        return given

    def _join(self, entry: _Entry, after: After | None) -> Join | None:
        """Return the upstreams of a node: the nodes in its arguments, and those given as `after`."""
        used = list(dict.fromkeys(node for value in entry.wanted.values() for node in references(value)))
        joins = [one for value in entry.wanted.values() for one in joins_in(value)]
        if isinstance(after, Join):
            joins.append(after)
        elif after is not None:
            found = nodes_in([after], "after")
            if found is None:
                allowed = "nodes, all_of, any_of, quorum or all_settled of nodes"
                raise InvalidInput(f"got {type(after).__name__}", field="after", allowed=allowed)
            used += found
        odd = [one for one in joins if not isinstance(one.policy, AllOf) and one.nodes]
        if not odd:
            nodes = list(dict.fromkeys([*used, *(node for one in joins for node in one.nodes)]))
            chosen = Join(nodes, AllOf()) if nodes else None
        else:
            chosen = odd[0]
            outside = {*used, *(node for one in joins for node in one.nodes)} - set(chosen.nodes)
            if outside or any(one.policy != chosen.policy for one in odd):
                raise InvalidInput(
                    f"{entry.node.name} comes after {odd[0]} and also after others",
                    field="after",
                    allowed="one any_of, quorum or all_settled for a node, and no other upstream",
                )
        for node in () if chosen is None else chosen.nodes:
            if node.flow is not self:
                raise InvalidInput(f"{node!r} belongs to another flow", field="after", allowed=f"nodes of {self!r}")
            if node.execution_id is None and node.name not in self._entries:
                raise InvalidInput(f"{node!r} was not added", field="after", allowed="a node that `add` returned")
        return chosen

    def submissions(self) -> dict[str, Submission]:
        """Return the submission of each node, by name, for the middleware around submissions."""
        return {name: entry.submission for name, entry in self._entries.items()}

    def ids(self, flow_id: FlowId, partitions: int, seed: UUID | None = None) -> dict[str, ExecutionId]:
        """Ids for the nodes, by name. With a `seed` the same flow gives the same ids."""
        home = partition_of_id(flow_id, partitions)
        return {
            name: mint_execution_id(flow_id=flow_id, count=partitions)
            if seed is None
            else ExecutionId(fit_partition(uuid5(seed, name), home, partitions))
            for name in self._entries
        }

    def build(self, ids: Mapping[str, ExecutionId], changed: Mapping[str, Submission] | None = None) -> list[NewNode]:
        """Return the nodes as the engine takes them. `changed` are the submissions after the middleware."""
        if self.grows is not None:
            if self._is_built:
                raise InvalidInput(
                    "its nodes were already added",
                    field="flow",
                    allowed="another ctx.flow() for more; flow.member(run.nodes[name]) is a node of the first there",
                )
            self._is_built = True

        def uuid_of(node: Node[Any]) -> UUID:
            return ids[node.name] if node.execution_id is None else node.execution_id

        nodes: list[NewNode] = []
        for name, declared in self._entries.items():
            entry = declared
            if changed is not None and changed[name] is not declared.submission:
                entry = _Entry(declared.node, changed[name], declared.join)
            submission = entry.submission
            task = submission.task
            if entry.wanted:
                places = {key: place_of(value, uuid_of) for key, value in entry.wanted.items()}
                plain = node_arguments.write(entry.given, places)
            else:
                plain = ENCODER.encode(entry.given)
            payload, encoding = task.codecs.seal(plain, ids[name])
            hooks = task.hooks(submission.options, nested=True)
            limits = task.limit_names.limits(submission.options, task.name, flow_kind(self))
            first = None if nodes else self.budget
            item = submission.options.item(task.name, payload, encoding, hooks=hooks, limits=limits, flow_budget=first)
            needed = {node for value in entry.wanted.values() for node in references(value)}
            nodes.append(
                NewNode(
                    name=name,
                    execution=msgspec.structs.replace(item, execution_id=ids[name]),
                    after=[
                        NewEdge(
                            upstream=node.name if node.execution_id is None else node.execution_id,
                            passes_result=node in needed,
                        )
                        for node in (() if entry.join is None else entry.join.nodes)
                    ],
                    policy=AllOf() if entry.join is None else entry.join.policy,
                )
            )
        return nodes

    async def submit(self, *, idempotency_key: str | None = None, detached: bool = False) -> FlowRun:
        """Store the whole flow in one call. With a key that was used before, return the existing flow.

        Inside a task it is submitted only once, even if the handler is re-run. It is then kept as long as the task may
        need its results, and cancelled with it, unless it is `detached`. A flow that grows adds its nodes.
        """
        key = None if idempotency_key is None else check_key(idempotency_key)
        if key is not None and self.grows is not None:
            raise InvalidInput(
                "given for a flow that grows", field="idempotency_key", allowed="no key: nodes are added once"
            )
        if type(detached) is not bool or (detached and self.grows is not None):
            raise InvalidInput(f"got {detached!r}", field="detached", allowed="True or False, for a new flow")
        client = await self._app.client()
        return await client.submit_flow(self, idempotency_key=key, detached=detached)

    @overload
    def submit_in(
        self, connection: AsyncConnection, /, *, idempotency_key: str | None = None, wake: bool = True
    ) -> Coroutine[Any, Any, FlowRun]: ...
    @overload
    def submit_in(
        self, connection: SyncConnection | str, /, *, idempotency_key: str | None = None, wake: bool = True
    ) -> FlowRun: ...
    def submit_in(self, connection: Any, /, *, idempotency_key: str | None = None, wake: bool = True) -> Any:
        """Store the whole flow in one call, as part of the transaction of your connection. See `Task.submit_in`.

        `wake=False` notifies no process, for a transaction that is to be prepared (two-phase commit).
        """
        return submit_flow_in(self._app, connection, self, idempotency_key, wake)

    def id_of(self, key: str) -> FlowId:
        """Return the id of the flow with this idempotency key."""
        return FlowId(uuid5(KEYS, f"{self.namespace}\0{self.name}\0{key}"))


def _title(name: str) -> str:
    if not check_text(name, "name"):
        raise InvalidInput("is empty", field="name", allowed="1 to 256 bytes")
    return name
