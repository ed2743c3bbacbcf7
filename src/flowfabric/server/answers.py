"""Answers: what a handler returns, as status, headers and bytes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from hashlib import blake2b
from types import UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin
from urllib.parse import quote, urlencode

from msgspec import Struct

from flowfabric.contracts import json_form
from flowfabric.server import cursors
from flowfabric.server.call import Answer, Call, EventStream, Page
from flowfabric.server.operation import PLACEHOLDER, Operation

JSON: Final = b"application/json"
_CAPITALS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Finished(NamedTuple):
    """A response: its body as bytes, or as pieces that are sent as they come."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    pieces: AsyncIterator[bytes] | None = None


class Writer:
    """Writes the answers of one operation."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._status = next(iter(operation.answers), 200)
        self._media = operation.media.encode()
        self._made = operation.made
        self._made_ids = PLACEHOLDER.findall(operation.made or "")
        records = [one for answer in operation.answers.values() for one in union_members(answer)]
        found = {one for one in records if is_record(one)}
        self._tags = {one: f'{{"status":"{snake_case(one.__name__)}",'.encode() for one in found if len(found) > 1}

    def write(self, call: Call, result: Any) -> Finished:
        """The response for what the handler returned."""
        answer = result if isinstance(result, Answer) else Answer(body=result, status=self._status)
        body = answer.body
        headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        if self._operation.no_store:
            headers.append((b"cache-control", b"no-store"))
        if self._made is not None and (place := self._place(call, body)) is not None:
            headers.append((b"location", place))
        if isinstance(body, EventStream):
            headers += [(b"content-type", body.media.encode()), (b"x-accel-buffering", b"no")]
            return Finished(answer.status, headers, b"", body.pieces)
        if isinstance(body, bytes):
            data = body
            headers.append((b"content-type", (answer.media or self._operation.media).encode()))
        elif body is None and answer.status in (204, 304):
            return Finished(answer.status, headers, b"")
        else:
            if isinstance(body, Page):
                rest = body.next_cursor
                if rest is not None:
                    rest = cursors.seal(rest, *self.filters(call))
                    headers.append((b"link", _next_link(call, rest)))
                body = {"items": body.items, "next_cursor": rest}
            data = self.encode(body)
            headers.append((b"content-type", answer.media.encode() if answer.media else self._media))
        if self._operation.etag and answer.status in (200, 201):
            tag = answer.etag or etag(data)
            headers.append((b"etag", tag.encode()))
            known = call.headers.get(b"if-none-match") if self._operation.method == "GET" else None
            if known is not None and matches(known.decode("latin-1"), tag):
                return Finished(304, [one for one in headers if one[0] != b"content-type"], b"")
        return Finished(answer.status, headers, data)

    def encode(self, body: Any) -> bytes:
        """The body in the JSON form; a record that may be one of several says by `status` which one it is."""
        data = json_form.encode(body)
        tag = self._tags.get(type(body))
        if tag is None:
            return data
        return tag[:-1] + b"}" if data == b"{}" else tag + data[1:]

    def _place(self, call: Call, body: Any) -> bytes | None:
        """Where to read what was made; None if nothing was."""
        ids = {name: getattr(body, name, call.path.get(name)) for name in self._made_ids}
        if None in ids.values():
            return None
        path = (self._made or "").format_map(
            {name: quote(value, safe="") if isinstance(value, str) else value for name, value in ids.items()}
        )
        return f"{call.scope.get('root_path', '')}{path}".encode()

    def filters(self, call: Call) -> tuple[Any, ...]:
        """What a cursor of this list is bound to."""
        query = call.query
        chosen = {name: getattr(query, name) for name in query.__struct_fields__ if name not in ("cursor", "limit")}
        return self._operation.name, call.path, chosen, call.namespace


def etag(data: bytes) -> str:
    """The tag of a body."""
    return f'"{blake2b(data, digest_size=12).hexdigest()}"'


def matches(given: str, tag: str) -> bool:
    """Whether a header `If-None-Match` names this version."""
    return given.strip() == "*" or tag in (one.strip().removeprefix("W/") for one in given.split(","))


def _next_link(call: Call, cursor: str) -> bytes:
    given = [(name, value) for name, value in call.request.query_params.multi_items() if name != "cursor"]
    root = call.scope.get("root_path", "")
    path = quote(root + call.scope["path"].removeprefix(root), safe="/:{}")
    return f'<{path}?{urlencode([*given, ("cursor", cursor)])}>; rel="next"'.encode()


def union_members(tp: Any) -> tuple[Any, ...]:
    """The types of a union; any other type is its only member."""
    return get_args(tp) if get_origin(tp) in (Union, UnionType) else (tp,)


def is_record(tp: Any) -> bool:
    return isinstance(tp, type) and issubclass(tp, Struct)


def snake_case(name: str) -> str:
    """The name of a record as its `status` has it."""
    return _CAPITALS.sub("_", name).lower()
