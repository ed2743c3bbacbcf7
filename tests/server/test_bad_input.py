"""The engine's tables of bad arguments, sent over HTTP: refused as the engine refuses them, naming the member.

Each operation of the table of operations says which calls of the engine it puts behind HTTP. An argument of such a call
travels in the path, the query or the body, by its own name or by one of `located.NAMES`. A value that does not fit the
type of its member is refused as `invalid_request`; one that does gets the engine's own code and kind.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from urllib.parse import quote, quote_from_bytes
from uuid import UUID

import asyncpg
import httpx
import msgspec
from msgspec import NODEFAULT
from msgspec.structs import fields

import flowfabric as ff
from flowfabric.errors import FlowFabricError, ValidationFailed
from flowfabric.server.located import wire_name
from flowfabric.server.operation import CONTROL, Operation
from flowfabric.server.operations import OPERATIONS
from flowfabric.server.requests import is_number, is_uuid
from flowfabric.server.service import Service
from tests import sampling
from tests.server.examples import path_of, required
from tests.sql.bad_input.table import DIGEST, DIGEST_FUNCTION, Case, World
from tests.sql.test_bad_input import CASES
from tests.support import Clock

# Arguments that are an object by name on the wire, or JSON of the user's own.
OTHERWISE = {"hard_limits", "soft_limits", "hard", "soft", "deltas", "nodes", "payload"}
# What a request needs besides the members that every one must have.
NEEDED: dict[str, dict[str, Any]] = {
    "create_budget": {"name": "n"},
    "create_quota": {"name": "n"},
    "put_schedule": {"every_seconds": 60},
    "stage_edge": {"downstream_execution_id": str(UUID(int=1))},
}
_ABSENT = object()


@dataclass(frozen=True)
class Member:
    """Where an argument travels."""

    where: str  # path, query or body
    name: str
    type: Any
    is_optional: bool = False


@dataclass(frozen=True)
class Attempt:
    operation: Operation
    case: Case
    argument: str
    member: Member
    value: Any  # as the engine is given it
    wire: Any


def members_of(operation: Operation) -> dict[str, Member]:
    found: dict[str, Member] = {}
    if operation.body is not None and operation.body is not bytes:
        found |= _members("body", operation.body)
    found |= _members("query", operation.query)
    for name in re.findall(r"\{(\w+)\}", operation.path):
        found[name] = Member("path", name, UUID if is_uuid(name) else int if is_number(name) else str)
    return found


def _members(where: str, record: Any) -> dict[str, Member]:
    return {
        one.encode_name: Member(where, one.encode_name, one.type, one.default is None or one.default is NODEFAULT)
        for one in fields(record)
    }


def place(argument: str, members: Mapping[str, Member]) -> Member | None:
    name = None if argument in OTHERWISE else wire_name(argument, members)
    return None if name is None else members[name]


def on_the_wire(value: Any, member: Member) -> Any:
    """The JSON value that means the same, or `_ABSENT`."""
    if isinstance(value, timedelta):
        return value.total_seconds() if member.name.endswith("_seconds") else _ABSENT
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if member.where != "body":
        if "list[" in str(member.type):  # one text is a list of it
            is_list = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
            return value if is_list else _ABSENT
        if isinstance(value, str):
            return value if member.where == "query" or (value and "\ud800" not in value) else _ABSENT
        return str(value) if isinstance(value, int) and member.type is int else _ABSENT
    try:
        written = json.dumps(value)
    except (TypeError, ValueError):
        return _ABSENT
    # JSON has no other integers and no other keys than these, and an empty object is none.
    return _ABSENT if json.loads(written) != value or value == {} or re.search(r"\d\.0\b", written) else value


def decoded(wire: Any, member: Member) -> Any:
    """What the server reads it as. `ValidationError`: it does not fit the type."""
    if member.where == "body":
        read = msgspec.convert(wire, member.type)
    else:
        read = msgspec.convert(wire, member.type, strict=False)
    if member.name.endswith("_seconds") and isinstance(read, int | float):
        return timedelta(seconds=read)
    return read


def attempts(world: World) -> Iterator[list[Attempt]]:
    """By operation and member."""
    for operation in OPERATIONS:
        if operation.streams:
            continue  # a value that it takes would begin a response without an end
        members = members_of(operation)
        for case in CASES:
            if case.name not in operation.engine:
                continue
            for argument, (_, values) in case.bad.items():
                member = place(argument, members)
                if member is None:
                    continue
                found = []
                for given in values:
                    value = given(world) if inspect.isfunction(given) else given
                    wire = on_the_wire(value, member)
                    if wire is not _ABSENT and not (wire is None and member.is_optional):
                        found.append(Attempt(operation, case, argument, member, value, wire))
                if found:
                    yield found


async def send(client: httpx.AsyncClient, one: Attempt, world: World) -> httpx.Response:
    members = members_of(one.operation)
    ids: dict[str, Any] = {}
    query: dict[str, Any] = required(one.operation.query)
    body: dict[str, Any] | None = None
    if one.operation.body is not None and one.operation.body is not bytes:
        body = required(one.operation.body) | NEEDED.get(one.operation.name, {})
    good = {name: _plain(value) for name, value in one.case.good(world).items()}
    if (authority := one.case.good(world).get("authority")) is not None:
        good["execution_id"] = str(authority.execution_id)
    for name, value in good.items():
        member = place(name, members)
        if member is not None and (wire := on_the_wire(value, member)) is not _ABSENT:
            {"path": ids, "query": query, "body": body or {}}[member.where][member.name] = wire
    target = {"path": ids, "query": query, "body": body}[one.member.where]
    assert target is not None
    target[one.member.name] = quoted(one.wire) if one.member.where == "path" else one.wire
    url = path_of(one.operation, ids)
    if query:
        pairs = [
            (name, each) for name, value in query.items() for each in (value if isinstance(value, list) else [value])
        ]
        url += "?" + "&".join(f"{name}={quoted(str(value))}" for name, value in pairs)
    content = None if body is None else json.dumps(body).encode()
    return await client.request(
        one.operation.method,
        url,
        content=content,
        headers={"Content-Type": "application/json"} if body is not None else None,
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else value


def quoted(text: Any) -> str:
    """In a URL; half of a pair of surrogates as the bytes that it would be."""
    return (
        quote_from_bytes(text.encode("utf-8", "surrogatepass"), safe="") if isinstance(text, str) else quote(str(text))
    )


async def verdict(engine: ff.Engine, one: Attempt, world: World, value: Any) -> ValidationFailed | None:
    """How the engine refuses it."""
    try:
        answer = await getattr(engine, one.case.name)(**(one.case.good(world) | {one.argument: value}))
        if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], FlowFabricError):
            raise answer[0]
    except ValidationFailed as error:
        return error
    return None


async def test_bad_arguments_are_refused_over_http_as_by_the_engine(
    plain_engine: ff.Engine, clock: Clock, sql: asyncpg.Connection[Any], client: httpx.AsyncClient, service: Service
) -> None:
    service.owner = plain_engine
    world = World()
    await world.build(plain_engine, clock)
    # The audit log has a row for each refused change.
    await sql.execute(DIGEST_FUNCTION.replace("<> 'sleeper'", "not in ('sleeper', 'operator_audit')"))
    before = await sql.fetchval(DIGEST)
    wrong: list[str] = []
    count = 0
    for group in attempts(world):
        for one in sampling.sample(group, 2):
            count += 1
            problem = await judge(plain_engine, client, one, world)
            if problem is not None:
                wrong.append(f"{one.operation.name} {one.member.name}={ascii(one.wire)[:60]}: {problem}")
        if await sql.fetchval(DIGEST) != before:
            wrong.append(f"{group[0].operation.name} {group[0].member.name}: changed something")
            before = await sql.fetchval(DIGEST)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    assert count > 300


async def judge(engine: ff.Engine, client: httpx.AsyncClient, one: Attempt, world: World) -> str | None:
    """What is wrong with the answer."""
    expected = {"invalid_request": "invalid_request"}
    is_named_by_engine = True
    try:
        read = decoded(one.wire, one.member)
    except UnicodeEncodeError:
        pass  # half of a pair of surrogates
    except OverflowError:
        expected["invalid_input"] = "invalid_input"
    except msgspec.ValidationError:
        pass
    else:
        if read != one.value or type(read) is not type(one.value):
            return None  # it means something else on the wire, such as "5" as a number of the query
        refused = await verdict(engine, one, world, read)
        if refused is None:
            return None
        expected[refused.code] = refused.kind
        is_named_by_engine = isinstance(refused, ff.InvalidInput) and (refused.field or "").startswith(one.argument)
        if one.member.where == "path":
            expected["not_found"] = "not_found"  # nothing can have this name
    if one.member.name == "policy":
        expected["invalid_input"] = "invalid_input"  # in JSON its times have another form, which is read first
        is_named_by_engine = True
    if len(str(one.wire)) > CONTROL - 100:
        expected["body_too_large"] = "body_too_large"
        is_named_by_engine = False
    if not json.dumps(one.wire, ensure_ascii=False).isascii():
        expected |= {"invalid_json": "invalid_json", "bad_request": "bad_request"}
    answer = await send(client, one, world)
    if answer.status_code < 400 or answer.headers["content-type"] != "application/problem+json":
        return f"answered {answer.status_code} {answer.text[:80]}"
    found = answer.json()
    if expected.get(found["code"]) != found["kind"]:
        return f"{found['status']} {found['code']} {found['kind']} {found['detail']}, not {expected}"
    if found["code"] in ("invalid_json", "bad_request", "not_found") or not is_named_by_engine:
        return None
    if one.member.where == "body":
        named = [each.get("pointer") or "" for each in found.get("errors", ())]
        is_named = any(each == f"/{one.member.name}" or each.startswith(f"/{one.member.name}/") for each in named)
    else:
        named = [each.get("parameter") for each in found.get("errors", ())]
        is_named = one.member.name in named
    if not is_named:
        return f"names {named} ({found['detail']}, {found.get('errors')})"
    return None
