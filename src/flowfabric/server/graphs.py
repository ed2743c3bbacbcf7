"""Graphs as requests have them: nodes by name, what comes after what, and arguments that are results of other nodes."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from flowfabric.client import node_arguments
from flowfabric.contracts.json_types import ENCODER
from flowfabric.errors import FlowFabricError, InvalidInput, ValidationFailed
from flowfabric.server.call import Call
from flowfabric.server.members import Payload
from flowfabric.server.new_execution import SubmitExecution, new_execution
from flowfabric.server.problems import FieldError, Problem, problem_of
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import (
    PARTITION_VALUES,
    ExecutionId,
    FlowId,
    mint_execution_id,
)
from flowfabric.values.joins import AllOf, AllSettled, AnyOf, EdgeGroupPolicy, OnSatisfied, Quorum

JoinKind = Literal["all_of", "any_of", "quorum", "all_settled"]
_NODE: Final = re.compile(r"nodes\[(\d+)\](?:\.execution)?(?:\.(.+))?")


class Join(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the edges into a node join: all upstreams have to succeed, any, `k` of them, or all have to end.

    `on_satisfied` is for `any_of` and `quorum`: what happens to the other upstreams when enough have succeeded.
    """

    kind: JoinKind = "all_of"
    k: int | None = None
    on_satisfied: OnSatisfied | None = None

    def policy(self, field: str = "join") -> EdgeGroupPolicy:
        """The policy of the engine; `InvalidInput` names what does not fit the kind."""
        rest = OnSatisfied.CANCEL_REMAINING if self.on_satisfied is None else self.on_satisfied
        if self.k is not None and self.kind != "quorum":
            raise InvalidInput(f"given for {self.kind}", field=f"{field}.k", allowed="only for quorum")
        if self.on_satisfied is not None and self.kind in ("all_of", "all_settled"):
            raise InvalidInput(
                f"given for {self.kind}", field=f"{field}.on_satisfied", allowed="only for any_of and quorum"
            )
        match self.kind:
            case "all_of":
                return AllOf()
            case "any_of":
                return AnyOf(rest)
            case "all_settled":
                return AllSettled()
        if self.k is None:
            raise InvalidInput("missing", field=f"{field}.k", allowed="how many upstreams have to succeed")
        return Quorum(self.k, rest)


class FlowNode(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of a graph: the task to run, and the nodes it comes after.

    `after` has names of nodes; of a flow that exists also names or ids of its members. `arguments_from` has arguments
    that are results of other nodes, by the names of the task's parameters: the name of a node means its result, a list
    of names the list of their results. With the join `any_of` such a list means the first result there is, with
    `all_settled` the list of all outcomes. The node comes after those nodes, too.
    """

    execution_kind: str
    arguments: dict[str, Any] | None = None
    arguments_from: dict[str, str | list[str]] | None = None
    input: Payload | None = None
    after: list[str] | None = None
    join: Join | None = None
    lane_id: str | None = None
    priority: int | None = None
    tags: dict[str, str] | None = None
    policy: dict[str, Any] | None = None
    delay_until: datetime | None = None
    delay_seconds: float | None = None
    execution_deadline_at: datetime | None = None
    execution_deadline_seconds: float | None = None


class Graph:
    """The nodes of one request, as the engine takes them.

    `members` are those that exist already, by name.
    """

    def __init__(
        self,
        call: Call,
        flow_id: FlowId,
        nodes: Mapping[str, FlowNode],
        *,
        namespace: str,
        members: Mapping[str, ExecutionId] | None = None,
    ) -> None:
        self._call = call
        self._given = nodes
        self._namespace = namespace
        self._members = members or {}
        self._ids = {name: mint_execution_id(flow_id=flow_id, count=PARTITION_VALUES) for name in nodes}

    def nodes(self) -> list[NewNode]:
        """The nodes; a `Problem` names what is wrong with one, by its place in the request."""
        made = []
        for name, node in self._given.items():
            try:
                made.append(self._node(name, node))
            except ValidationFailed as error:
                raise located(error, name) from None
        return made

    def _node(self, name: str, node: FlowNode) -> NewNode:
        wanted = node.arguments_from or {}
        passed = [one for given in wanted.values() for one in ([given] if isinstance(given, str) else given)]
        upstreams = list(dict.fromkeys([*(node.after or ()), *passed]))
        for field, names in (("after", node.after or ()), ("arguments_from", passed)):
            for one in names:
                if self._uuid(one) is None:
                    raise InvalidInput(f"{one!r} is not a node", field=field, allowed="names of nodes of this flow")
        needed = set(passed)
        policy = AllOf() if node.join is None else node.join.policy()
        return NewNode(
            name=name,
            execution=self._execution(name, node, policy),
            after=[
                NewEdge(upstream=one if one in self._given else self._found(one), passes_result=one in needed)
                for one in upstreams
            ],
            policy=policy,
        )

    def _execution(self, name: str, node: FlowNode, policy: EdgeGroupPolicy) -> NewExecution:
        """The execution of a node. Its arguments are checked here, or when the results among them are known."""
        return new_execution(
            self._call,
            SubmitExecution(
                execution_kind=node.execution_kind,
                arguments=None if node.arguments_from else node.arguments,
                input=self._filled(name, node, policy) if node.arguments_from else node.input,
                lane_id=node.lane_id,
                namespace=self._namespace,
                priority=node.priority,
                tags=node.tags,
                policy=node.policy,
                delay_until=node.delay_until,
                delay_seconds=node.delay_seconds,
                execution_deadline_at=node.execution_deadline_at,
                execution_deadline_seconds=node.execution_deadline_seconds,
                execution_id=self._ids[name],
            ),
            in_batch=True,
            nested=True,
        )

    def _filled(self, name: str, node: FlowNode, policy: EdgeGroupPolicy) -> Payload:
        """The arguments of a node that takes results of others."""
        given, wanted = node.arguments or {}, node.arguments_from or {}
        if both := sorted(set(wanted) & set(given)):
            raise InvalidInput(f"{both[0]} is in arguments, too", field="arguments_from", allowed="one of them")
        if node.input is not None:
            raise InvalidInput("given with input", field="arguments_from", allowed="one of them")
        app = self._call.service.app
        task = None if app is None else app.find_task(node.execution_kind)
        if task is not None and (unknown := sorted({*given, *wanted} - task.parameter_names)):
            raise InvalidInput(
                f"{task.name} takes no argument {unknown[0]!r}",
                field="arguments_from" if unknown[0] in wanted else "arguments",
                allowed=", ".join(sorted(task.parameter_names)),
            )
        raw = {key: msgspec.Raw(ENCODER.encode(value)) for key, value in given.items()}
        plain = node_arguments.write(raw, {key: self._place(one, policy) for key, one in wanted.items()})
        payload, encoding = (plain, None) if task is None else task.codecs.seal(plain, self._ids[name])
        return Payload(base64=base64.b64encode(payload).decode(), encoding=encoding)

    def _place(self, source: str | Sequence[str], policy: EdgeGroupPolicy) -> list[Any]:
        """Where an argument comes from, as `node_arguments` stores it."""
        if isinstance(source, str):
            return ["node", str(self._found(source))]
        kind = {AnyOf: "first", AllSettled: "settled"}.get(type(policy), "all")
        return [kind, [str(self._found(one)) for one in source]]

    def _found(self, name: str) -> ExecutionId:
        found = self._uuid(name)
        assert found is not None  # checked before
        return found

    def _uuid(self, name: str) -> ExecutionId | None:
        return self._ids.get(name) or self._members.get(name)


def located(error: FlowFabricError, node: str | None = None, names: Sequence[str] = ()) -> Problem:
    """A refusal with the place in the request: of a node by its name, or by the index that the engine names it by."""
    problem = problem_of(error)
    if not isinstance(error, InvalidInput):
        place, _, detail = (error.detail or "").partition(": ")
        if (found := _NODE.fullmatch(place)) is None or int(found[1]) >= len(names):
            return problem
        inner = problem_of(ValidationFailed(error.kind, detail)).within(_pointer(["nodes", names[int(found[1])]]))
        inner.detail = f"{names[int(found[1])]}: {detail}"
        return inner
    if error.field is None:
        return problem
    field: str | None = error.field
    if node is None and (found := _NODE.fullmatch(error.field)) is not None and int(found[1]) < len(names):
        node, field = names[int(found[1])], found[2]
    if node is None:
        return problem
    pointer = _pointer(["nodes", node, *_steps(field or "")])
    problem.errors = (FieldError(error.problem, pointer=pointer, allowed=error.allowed),)
    problem.detail = f"{node}: {error.detail}"
    return problem


def _pointer(parts: Sequence[str]) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


def _steps(field: str) -> list[str]:
    return [part for part in re.split(r"[.\[ ]", field.split("[", 1)[0]) if part]
