"""Requests: path, query and body as records. A refusal names every wrong member."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, cast, get_origin
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from msgspec.structs import fields

from flowfabric.errors import InvalidInput
from flowfabric.server.answers import union_members
from flowfabric.server.operation import PLACEHOLDER, Operation
from flowfabric.server.problems import FieldError, Problem
from flowfabric.server.wrong_members import allowed_values, wrong_members
from flowfabric.values.ids import parse_uuid

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_NAMES: Final = frozenset(("worker_id", "key_id"))  # texts, though they end like ids
_WHERE: Final = re.compile(r" - at `\$?(.*)`$")
_NOT_JSON: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_INT: Final = re.compile(r"0|[1-9][0-9]{0,8}")


class Disconnected(Exception):
    """The client left before its request was complete."""


class Reader:
    """Reads the requests of one operation."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self.names = tuple(PLACEHOLDER.findall(operation.path))
        self._parsers = [_parser(name) for name in self.names]
        self._query = operation.query
        self._lists = {one.encode_name for one in fields(operation.query) if _is_list(one.type)}
        self._known = {one.encode_name for one in fields(operation.query)}
        # Links pass through mail programs, which add parameters of their own.
        self._ignores = not operation.query.__struct_config__.forbid_unknown_fields
        self._no_query = msgspec.convert({}, operation.query) if not _required(operation.query) else None
        self._is_raw = operation.body is bytes
        record = None if self._is_raw else cast("type[msgspec.Struct] | None", operation.body)
        self._decoder = None if record is None else msgspec.json.Decoder(record)
        self._no_body = None
        if record is not None and not _required(record):
            self._no_body = msgspec.convert({}, record)

    def path(self, values: Sequence[str]) -> dict[str, Any]:
        """The parameters of the path."""
        found: dict[str, Any] = {}
        for name, parse, value in zip(self.names, self._parsers, values, strict=True):
            try:
                found[name] = value if parse is None else parse(value, name)
            except InvalidInput as error:
                raise _wrong([FieldError(error.problem, parameter=name, allowed=error.allowed)]) from None
        return found

    def query(self, text: bytes) -> Any:
        """The record of the query."""
        if not text and self._no_query is not None:
            return self._no_query
        given: dict[str, Any] = {}
        errors: list[FieldError] = []
        try:
            pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=1000)
        except ValueError:
            raise Problem(400, "bad_request", "the query is not valid") from None
        for name, value in pairs:
            if name not in self._known:
                if self._ignores:
                    continue
                errors.append(FieldError("unknown", parameter=name, allowed=", ".join(sorted(self._known)) or "none"))
            elif name in self._lists:
                given.setdefault(name, []).append(value)
            elif name in given:
                errors.append(FieldError("given twice", parameter=name, allowed="once"))
            else:
                given[name] = value
        if not errors:
            try:
                return msgspec.convert(given, self._query, strict=False)
            except msgspec.ValidationError:
                pass
        raise _wrong([*errors, *self._wrong_parameters(given)])

    def _wrong_parameters(self, given: Mapping[str, Any]) -> Iterator[FieldError]:
        for one in fields(self._query):
            name = one.encode_name
            if name not in given:
                if one.required:
                    yield FieldError("missing", parameter=name)
                continue
            try:
                msgspec.convert(given[name], one.type, strict=False)
            except msgspec.ValidationError as error:
                yield FieldError(_located(error)[0], parameter=name, allowed=allowed_values(one.type))

    def body(self, data: bytes, content_type: bytes | None) -> Any:
        """The record of the body; None for an operation that takes none."""
        if self._is_raw:
            return data
        if self._decoder is None:
            if data.strip() not in (b"", b"{}"):
                raise Problem(422, "invalid_request", f"{self._operation.method} {self._operation.path} takes no body")
            return None
        if not data and self._no_body is not None:
            return self._no_body
        if content_type is None or not _is_json(content_type):
            raise Problem(
                415, "unsupported_media_type", "the body must be JSON", errors=[
                    FieldError("wrong or missing", parameter="Content-Type", allowed="application/json")
                ],
            )  # fmt: skip
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            _check_syntax(data)
            return self._nearly(data, error)
        except _NOT_JSON as error:
            raise _not_json(error) from None

    def _nearly(self, data: bytes, error: msgspec.ValidationError) -> Any:
        """The record of a body that only JSON Schema accepts, such as 2.0 for an integer; else every wrong member."""
        record = cast("type[msgspec.Struct]", self._operation.body)
        errors = wrong_members(record, data)
        if not errors:
            try:
                return msgspec.json.decode(data, type=record, strict=False)
            except msgspec.MsgspecError:
                detail, pointer = _located(error)
                errors = [FieldError(detail, pointer=pointer)]
        raise _wrong(errors)


def _check_syntax(data: bytes) -> None:
    try:
        msgspec.json.decode(data)
    except _NOT_JSON as error:
        raise _not_json(error) from None


def _not_json(error: Exception) -> Problem:
    return Problem(400, "invalid_json", f"the body is not JSON: {error}")


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], operation: Operation, limit: int) -> bytes:
    """The whole body, refused as soon as it is known to be too long."""
    if operation.body is not None and headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise Problem(
            415, "unsupported_media_type", "the body is compressed", headers={"Accept-Encoding": "identity"}, errors=[
                FieldError("not supported", parameter="Content-Encoding", allowed="identity, or no such header")
            ],
        )  # fmt: skip
    announced = headers.get(b"content-length")
    if announced is not None:
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(operation, limit)
        if announced == b"0":
            return b""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Disconnected
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise _too_large(operation, limit)
        return body
    chunks = [body]
    size = len(body)
    while message.get("more_body", False):
        if size > limit:
            raise _too_large(operation, limit)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
    if size > limit:
        raise _too_large(operation, limit)
    return b"".join(chunks)


def _too_large(operation: Operation, limit: int) -> Problem:
    return Problem(
        413,
        "body_too_large",
        f"the body is longer than {limit} bytes",
        limit_bytes=limit,
        route=operation.path,
        headers={"Connection": "close"},
    )


def _wrong(errors: Sequence[FieldError]) -> Problem:
    first = errors[0]
    where = first.parameter or first.pointer
    more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
    return Problem(422, "invalid_request", f"{where}: {first.detail}{more}" if where else first.detail, errors=errors)


def _located(error: msgspec.ValidationError) -> tuple[str, str]:
    """What a validation error says, and where in the document."""
    text = str(error)
    found = _WHERE.search(text)
    if found is None:
        return text, ""
    steps = re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", found[1])
    return text[: found.start()], "".join(f"/{name or place}" for name, place in steps)


def is_uuid(name: str) -> bool:
    """Whether a parameter of a path is a UUID."""
    return name.endswith("_id") and name not in _NAMES


def is_number(name: str) -> bool:
    """Whether a parameter of a path is a number."""
    return name == "attempt"


def _parser(name: str) -> Callable[[str, str], Any] | None:
    if is_uuid(name):
        return _uuid
    return _int if is_number(name) else None


def _uuid(value: str, name: str) -> UUID:
    return parse_uuid(value, name)


def _int(value: str, name: str) -> int:
    if not _INT.fullmatch(value):
        raise InvalidInput(f"got {value[:40]!r}", field=name, allowed="a number from 0")
    return int(value)


def _is_json(content_type: bytes) -> bool:
    media = content_type.split(b";", 1)[0].strip().lower()
    return media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json"))


def _required(record: type[msgspec.Struct]) -> bool:
    return any(one.required for one in fields(record))


def _is_list(tp: Any) -> bool:
    return any(get_origin(one) in (list, tuple, set, frozenset) or one in (list, tuple) for one in union_members(tp))
