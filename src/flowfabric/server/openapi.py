"""The OpenAPI document (3.1), made from the table of operations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any, Final, cast, get_args, get_type_hints

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from flowfabric.contracts import json_form
from flowfabric.engine.service import VERSION
from flowfabric.server import problems
from flowfabric.server.answers import is_record, union_members
from flowfabric.server.call import Page
from flowfabric.server.operation import ROUTES, Operation, Repeats, Within
from flowfabric.server.parameters import words_of
from flowfabric.server.problems import ProblemDocument
from flowfabric.server.requests import Reader, is_number, is_uuid
from flowfabric.server.schemas import Schema, Schemas, described

_ABOUT: Final = """\
Submit, watch and decide durable executions.

Instants are RFC 3339 in UTC, durations numbers of seconds under a name that ends in `_seconds`. An answer that may be
one of several records says by `status` which one it is. Payloads are JSON values; text that is not JSON is a string,
other bytes are `{"base64": ..., "encoding": ...}`; in requests such bytes are the member `input`. The arguments of a
task are an object by the names of its parameters. Unknown members of requests are refused by name; ignore unknown
members of responses.

Every refusal is `application/problem+json` (RFC 9457): `code` says what it is, `retryable` whether repeating the
request can succeed, `errors` names each wrong member by its JSON pointer, or the parameter by its name. `type` is the
address of a page that explains the code.

A list has `items`, `next_cursor` and the header `Link` with `rel="next"`. A cursor belongs to its filters.
"""
_FORM: Final = "application/x-www-form-urlencoded"
_PROBLEMS: Final[Mapping[int, str]] = {
    304: "Not modified: `If-None-Match` names the current version.",
    400: "A value is malformed or out of range, or the body is not JSON.",
    401: "There is no valid API key.",
    403: "The API key may not do this.",
    404: "Nothing of this name exists, or it belongs to a namespace that the API key does not have.",
    409: "The state does not allow it, or another call was faster.",
    410: "It is no longer stored.",
    412: "`If-Match` names another version than the stored one.",
    413: "The body is too long.",
    415: "The body is not sent as JSON.",
    422: "Members of the body, the query or the path are wrong, missing or unknown.",
    429: "Too many requests, or no room under a limit; `Retry-After` says when to come back.",
    500: "The server failed.",
    503: "The database is away, full or read-only, the server is shutting down, or this deployment does not offer it.",
    504: "What the request waited for did not happen in time; it continues.",
}
_WITHIN: Final[Mapping[Within, str]] = {
    Within.EXECUTION: "an API key with namespaces finds only executions of these",
    Within.FLOW: "an API key with namespaces finds only flows of these",
    Within.GIVEN: "an API key with namespaces has to name one of them, unless it has only one",
    Within.ITEMS: "an API key with namespaces reaches only what belongs to these",
    Within.EVERY: "concerns all namespaces: refused to API keys with namespaces",
    Within.NONE: "",
}
_REPEATS: Final[Mapping[Repeats, str]] = {
    Repeats.OWN: "Names the request: sent again, it changes nothing more and returns what it made.",
    Repeats.KEPT: "Names the request: sent again within 24 hours, it gets the same answer and changes nothing more.",
    Repeats.SECRET: "Names the request: sent again, it is refused (409), because the response had a secret.",
}


def document(operations: Iterable[Operation], base: str = "") -> dict[str, Any]:
    """The document. `base` is the path under which the server is mounted."""
    table = tuple(operations)
    schemas = Schemas()
    problem = schemas.of(ProblemDocument, answer=True)
    named = {one.name: one for one in table}
    paths: dict[str, dict[str, Any]] = {}
    for one in table:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, named, schemas)
    chapters = {one.chapter: sys.modules[f"{ROUTES}.{one.chapter}"].__doc__ or "" for one in table}
    return {
        "openapi": "3.1.0",
        "info": {"title": "FlowFabric", "version": ".".join(map(str, VERSION)), "description": _ABOUT},
        "servers": [{"url": base or "/"}],
        "tags": [{"name": name, "description": words.splitlines()[0]} for name, words in chapters.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {f"problem_{status}": _problem(status, problem) for status in _PROBLEMS if status != 304},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key: `ffk_<id>_<secret>`."}
            },
        },
    }


def _problem(status: int, schema: Schema) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _PROBLEMS[status],
        "content": {problems.MEDIA: {"schema": schema}},
        "headers": {"X-Request-Id": _header("The id of the request, also `instance` of the problem.")},
    }
    if status in (429, 503):
        answer["headers"]["Retry-After"] = {
            "description": "Seconds to wait.", "required": True, "schema": {"type": "integer"}
        }  # fmt: skip
    return answer


def _header(words: str) -> dict[str, Any]:
    return {"description": words, "schema": {"type": "string"}}


def _operation(one: Operation, named: Mapping[str, Operation], schemas: Schemas) -> dict[str, Any]:
    summary, _, rest = described(one.handler).partition("\n")
    notes = [rest.strip()]
    if one.scope is not None:
        rule = _WITHIN[one.within]
        notes.append(f"Needs the scope `{one.scope}`" + (f"; {rule}." if rule else "."))
    made: dict[str, Any] = {
        "operationId": one.name,
        "tags": [one.chapter],
        "summary": summary.rstrip("."),
        "description": "\n\n".join(note for note in notes if note),
        "parameters": _parameters(one, schemas),
        "responses": _responses(one, named, schemas),
        "security": [] if one.scope is None else [{"key": [str(one.scope)]}],
    }
    if one.body is bytes:
        made["requestBody"] = {
            "required": False,
            "content": {"application/json": {"schema": {}}, _FORM: {"schema": {"type": "object"}}},
        }
    elif one.body is not None:
        record = cast("type[Struct]", one.body)
        made["requestBody"] = {
            "required": any(each.required for each in fields(record)),
            "content": {"application/json": {"schema": schemas.of(one.body, answer=False)}},
        }
    return made


def _parameters(one: Operation, schemas: Schemas) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in Reader(one).names:
        schema: Schema = {"type": "string", "minLength": 1}
        if is_uuid(name):
            schema = {"type": "string", "format": "uuid"}
        elif is_number(name):
            schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
        words = words_of(one.name, name)
        found.append({"name": name, "in": "path", "required": True, "description": words, "schema": schema})
    for each in fields(one.query):
        schema = schemas.of(_without_none(each.type), answer=False)
        if each.default not in (msgspec.NODEFAULT, None):
            schema["default"] = json_form.to_json(each.default)
        name, words = each.encode_name, words_of(one.name, each.encode_name)
        found.append({"name": name, "in": "query", "required": each.required, "description": words, "schema": schema})
    if one.repeats in _REPEATS:
        key = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"}
        found.append({"name": "Idempotency-Key", "in": "header", "description": _REPEATS[one.repeats], "schema": key})
    if "after" in one.query.__struct_fields__ and one.streams:
        words = "Continue after this event: its id. It wins over `after`."
        found.append({"name": "Last-Event-ID", "in": "header", "description": words, "schema": {"type": "string"}})
    if one.etag and one.method == "GET":
        words = "The `ETag` of an earlier response: 304 without a body if it is still the same."
        found.append({"name": "If-None-Match", "in": "header", "description": words, "schema": {"type": "string"}})
    elif one.heeds_if_match:
        words = "Change only the version that was read: its `ETag`."
        found.append({"name": "If-Match", "in": "header", "description": words, "schema": {"type": "string"}})
    return found


def _without_none(tp: Any) -> Any:
    members = [each for each in union_members(tp) if each is not type(None)]
    return members[0] if len(members) == 1 else tp


def _responses(one: Operation, named: Mapping[str, Operation], schemas: Schemas) -> dict[str, Any]:
    records = [each for answer in one.answers.values() for each in union_members(answer) if is_record(each)]
    found: dict[str, Any] = {}
    for status, answer in one.answers.items():
        headers = {"X-Request-Id": _header("The id of the request.")}
        made: dict[str, Any] = {"description": HTTPStatus(status).phrase, "headers": headers}
        if answer is not None:
            made["content"] = {one.media: {"schema": _answer(one, answer, schemas, tagged=len(set(records)) > 1)}}
            made["content"] |= {media: {"schema": {"type": "string"}} for media in one.also}
        if one.etag and status in (200, 201):
            headers["ETag"] = _header("The version of what was read.")
        if _is_page(one):
            headers["Link"] = _header('The next page, `rel="next"`.')
        if one.made is not None and status in (201, 202):
            headers["Location"] = _header("The path of what was made.")
        if links := _links(one, answer, named, made=status == HTTPStatus.CREATED):
            made["links"] = links
        found[str(status)] = made
    for status in statuses(one):
        if str(status) not in found:
            found[str(status)] = (
                {"description": _PROBLEMS[304]}
                if status == 304
                else {"$ref": f"#/components/responses/problem_{status}"}
            )
    return dict(sorted(found.items()))


def statuses(one: Operation) -> list[int]:
    """The statuses of refusals that an operation may answer with."""
    found = {400, 422, 429, 500, 503}
    if one.scope is not None:
        found |= {401, 403}
    elif one.method == "POST":
        found.add(403)  # the form of another site
    if one.method == "POST" and "wait" in one.query.__struct_fields__:
        found.add(504)
    if "{" in one.path or one.within in (Within.GIVEN, Within.ITEMS):
        found.add(404)
    if one.method == "GET":
        if "{" in one.path:
            found |= {409, 410}
        if one.etag:
            found.add(304)
    else:
        found |= {404, 409, 413}
        if one.body is not None:
            found.add(415)
        if one.heeds_if_match:
            found.add(412)
    return sorted(found)


def _answer(one: Operation, answer: Any, schemas: Schemas, *, tagged: bool) -> Schema:
    if answer is bytes or not one.media.startswith("application/json"):
        return {"type": "string"} if one.media.startswith("text/") else {}
    if _is_page(one):
        items = schemas.of(get_args(answer)[0], answer=True)
        return {
            "type": "object",
            "required": ["items", "next_cursor"],
            "properties": {"items": {"type": "array", "items": items}, "next_cursor": {"type": ["string", "null"]}},
        }
    if tagged:
        found = [
            schemas.tagged(each) if is_record(each) else schemas.of(each, answer=True) for each in union_members(answer)
        ]
        return found[0] if len(found) == 1 else {"oneOf": found}
    return schemas.of(answer, answer=True)


@cache
def _returned(handler: Any) -> Any:
    return get_type_hints(handler).get("return")


def _is_page(one: Operation) -> bool:
    return Page in union_members(_returned(one.handler))


def _links(one: Operation, answer: Any, named: Mapping[str, Operation], *, made: bool) -> dict[str, Any]:
    """The operations that take the id which this answer has: of what was made, or of the first item of a list."""
    prefix = ""
    if _is_page(one):
        answer, prefix = get_args(answer)[0], "items/0/"
    elif one.method != "POST":
        return {}
    takes = {target.name: names[0] for target in named.values() if len(names := Reader(target).names) == 1}
    own = () if made else Reader(one).names
    members = [name for each in union_members(answer) if is_record(each) for name in get_type_hints(each)]
    ids = (name for name in members if name.endswith("_id") and name not in own and name in takes.values())
    name = next(ids, None)
    return {
        target: {"operationId": target, "parameters": {f"path.{name}": f"$response.body#/{prefix}{name}"}}
        for target, taken in takes.items()
        if taken == name
    }
