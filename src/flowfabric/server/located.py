"""Which member of a request an error of the engine means: its arguments travel in the path, the query or the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import fields, replace

from flowfabric.server.operation import PLACEHOLDER, Operation
from flowfabric.server.problems import FieldError, Problem

# Arguments of the engine that have another name on the wire.
NAMES: Final[Mapping[str, str]] = {
    "lane_ids": "lane", "lane_id": "lane", "kinds": "kind", "states": "state", "families": "family",
    "waitpoint_key": "key", "flow_kind": "kind", "signal_name": "name", "signal_category": "category",
    "new_priority": "priority", "new_kid": "kid", "hard": "hard_limits", "soft": "soft_limits",
    "attempt_index": "attempt", "count_limit": "limit", "from_cursor": "from", "to_cursor": "to",
    "name_prefix": "prefix", "deltas": "usage", "capabilities": "worker_capabilities",
}  # fmt: skip


def wire_name(argument: str, known: Mapping[str, object]) -> str | None:
    """The name, among those that a request has, under which an argument of the engine travels."""
    return next((one for one in (argument, f"{argument}_seconds", NAMES.get(argument)) if one in known), None)


def located(problem: Problem, operation: Operation) -> Problem:
    """The same refusal, naming members as the request does."""
    known = dict.fromkeys(PLACEHOLDER.findall(operation.path), False)
    known |= {one.encode_name: False for one in fields(operation.query)}
    if isinstance(operation.body, type) and issubclass(operation.body, Struct):
        known |= {one.encode_name: True for one in fields(operation.body)}
    problem.errors = tuple(_located(problem, one, known) for one in problem.errors)
    return problem


def _located(problem: Problem, error: FieldError, known: Mapping[str, bool]) -> FieldError:
    if error.pointer is None:
        return error
    head, slash, rest = error.pointer[1:].partition("/")
    name = wire_name(head, known)
    if name is None:
        if not rest or wire_name(rest.partition("/")[0], known) is None:
            return error
        # Of a record whose members are those of the request, such as a filter.
        problem.detail = problem.detail.removeprefix(f"{head}.")
        return _located(problem, replace(error, pointer=f"/{rest}"), known)
    if problem.detail.startswith(f"{head}:"):
        problem.detail = name + problem.detail[len(head) :]
    if known[name]:
        return replace(error, pointer=f"/{name}{slash}{rest}")
    return replace(error, pointer=None, parameter=name)
