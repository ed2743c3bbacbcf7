"""Payloads of signals against the schemas that waits store: verdicts, agreement with the decoder, and bounds."""

from __future__ import annotations

import dataclasses
import enum
import time
import types
import typing
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric.contracts.payload_check import check_of
from flowfabric.contracts.payload_schema import MAX_SCHEMA, schema_of
from flowfabric.contracts.safe_patterns import longest_text
from flowfabric.contracts.value_types import ValueType
from tests.each import each
from tests.sampling import examples


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Decision(msgspec.Struct):
    ok: bool
    comment: str = ""
    when: datetime | None = None
    tags: list[int] = []


class Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    first_name: str
    age: Annotated[int, msgspec.Meta(ge=0, lt=150)] = 1


class Card(msgspec.Struct, tag=True):
    number: str


class Cash(msgspec.Struct, tag=True):
    amount: int


class Row(msgspec.Struct, array_like=True):
    x: int
    y: str = ""


class Tree(msgspec.Struct):
    kids: list[Tree] = []
    value: int | None = None


@dataclasses.dataclass
class Point:
    x: float
    at: date


class Options(TypedDict, total=False):
    size: int
    colour: Colour


class Pair(NamedTuple):
    left: int
    right: str = ""


class Order(pydantic.BaseModel):
    item: str
    count: int = 1
    lines: list[Order] = []


class Renamed(pydantic.BaseModel):
    item: str = pydantic.Field(alias="theItem")
    count: int = 1


class Lax(pydantic.BaseModel):
    ok: bool
    amount: float = 0
    when: datetime | None = None
    count: Annotated[int, pydantic.Field(ge=1)] = 1
    size: Literal["a", "1"] = "a"
    colour: Colour | int = 1

    @pydantic.field_validator("ok", mode="before")
    @classmethod
    def is_yes(cls, value: Any) -> Any:
        return value == "yes" if isinstance(value, str) else value or False


class Wrapped(pydantic.BaseModel):
    x: int
    y: Annotated[Order | list[Order], pydantic.Field(default_factory=list)]

    @pydantic.model_validator(mode="before")
    @classmethod
    def from_number(cls, value: Any) -> Any:
        return {"x": value} if isinstance(value, int) else value


class Closed(pydantic.BaseModel, extra="forbid", coerce_numbers_to_str=True):
    age: str
    value: set[UUID] | dict[str, Decimal] = set()
    when: date | clock_time | timedelta | None = None
    lax: Lax | None = None


class Listed(pydantic.RootModel[list[Renamed | Closed]]):
    pass


# What is checked, the payload, and the verdict: the field and what is allowed there; None if it fits.
VERDICTS: list[tuple[Any, Any, tuple[str, str] | None]] = [
    (Decision, {"ok": True}, None),
    (Decision, {"ok": True, "unknown": 1}, None),
    (Decision, {"ok": True, "comment": 5}, ("payload.comment", "text")),
    (Decision, {"comment": "yes"}, ("payload.ok", "true or false")),
    (Decision, {"ok": 1}, ("payload.ok", "true or false")),
    (Decision, {"ok": True, "tags": [1, 2, "x"]}, ("payload.tags[2]", "an integer")),
    (Decision, {"ok": True, "when": "tomorrow"}, ("payload.when", "a date and time")),
    (Decision, None, ("payload", "an object")),
    (Decision, [], ("payload", "an object")),
    (Decision | None, None, None),
    (Decision | None, {"ok": "yes"}, ("payload.ok", "true or false")),
    (Decision | None, 5, ("payload", "Decision (an object) or null")),
    (Strict, {"firstName": "Ada", "age": 3}, None),
    (Strict, {"firstName": "Ada", "first_name": ""}, ("payload.first_name", "firstName, age")),
    (Strict, {"firstName": "Ada", "age": 150}, ("payload.age", "an integer, at least 0, less than 150")),
    (Card | Cash, {"type": "Cash", "amount": 5}, None),
    (Card | Cash, {"type": "Cash", "amount": "5"}, ("payload.amount", "an integer")),
    (int, 5, None),
    (int, 5.0, ("payload", "an integer")),
    (int, True, ("payload", "an integer")),
    (float, 5, None),
    (str, "", None),
    (str, None, ("payload", "text")),
    (Literal["yes", "no"], "maybe", ("payload", 'one of "no", "yes"')),
    (Colour, "green", ("payload", 'one of "red", "blue"')),
    (Level, 1.0, ("payload", "one of 1, 2")),
    (UUID, "x", ("payload", "a UUID")),
    (Decimal, "1.5", None),
    (Decimal, 1.5, None),
    (Decimal, "x", ("payload", "a decimal number")),
    (bytes, "!", ("payload", "base64")),
    (dict[int, str], {"1": "a"}, None),
    (dict[int, str], {"x": "a"}, ("payload", "an integer")),
    (dict[str, int], {"a b": "c"}, ("payload['a b']", "an integer")),
    (Annotated[str, msgspec.Meta(pattern=r"^\d{3}$")], "1234", ("payload", r"text, like ^\d{3}$")),
    (Annotated[list[int], msgspec.Meta(max_length=2)], [1, 2, 3], ("payload", "a list, at most 2 items")),
    (Tree, {"kids": [{"kids": [{"value": "x"}]}]}, ("payload.kids[0].kids[0].value", "an integer or null")),
    (tuple[int, str], [1, "a"], None),
    (tuple[int, str], [1], ("payload", "a list, at least 2 items, at most 2 items")),
    (set[int], [1, 1], None),
    (Order, {"item": "pen", "lines": [{"item": 5}]}, ("payload.lines[0].item", "text")),
    (Order, {}, ("payload.item", "text")),
    (Lax, {"ok": "yes", "amount": "12.50", "when": 1700000000, "count": 5.0}, None),
    (Lax, {"amount": 1}, ("payload.ok", "a value")),
    (Lax, {"ok": [], "count": "0"}, None),
    (Lax, {"ok": True, "count": 0}, ("payload.count", "an integer, at least 1")),
    (Lax, {"ok": True, "when": []}, ("payload.when", "null or a date and time")),
    (Lax, [], ("payload", "an object")),
    (Renamed, {"item": 5}, None),
    (Renamed, [], ("payload", "an object")),
    (Closed, {"age": 5, "more": 1}, ("payload.more", "age, value, when, lax")),
    (dict, [], ("payload", "an object")),
]


@each(("wanted", "payload", "verdict"), VERDICTS)
def test_a_payload_is_refused_with_the_field_and_what_is_allowed(
    wanted: Any, payload: Any, verdict: tuple[str, str] | None
) -> None:
    schema = schema_of(ValueType.of(wanted))
    assert schema is not None
    found = check_of(schema).misfit(payload)
    assert (found and (found.field, found.allowed)) == verdict


@each("wanted", [Any, object, Wrapped, Path | None])
def test_a_type_that_one_schema_cannot_say_has_none_or_an_open_one(wanted: Any) -> None:
    schema = schema_of(ValueType.of(wanted))
    assert schema is None or check_of(schema).misfit(None) is None


def test_a_refusal_never_shows_the_payload() -> None:
    schema = schema_of(ValueType.of(Strict))
    assert schema is not None
    for payload in ({"firstName": {"hunter2": 1}}, {"firstName": "a", "age": "hunter2"}, "hunter2", ["hunter2"]):
        assert "hunter2" not in str(check_of(schema).misfit(payload))


# ---- agreement with the decoder

TYPES: list[Any] = [
    bool, int, float, str, bytes, datetime, date, clock_time, timedelta, UUID, Decimal, Colour, Level,
    Literal["a", 1, None], Decision, Strict, Card, Card | Cash, Row, Tree, Point, Options, Pair, list[int], set[str],
    tuple[int, str], tuple[int, ...], dict[str, int], dict[int, Decision], dict[UUID, bool], dict[Colour, int],
    dict[float, int], Decision | None, int | str | None, list[Decision | None] | dict[str, Card],
    Annotated[int, msgspec.Meta(multiple_of=3, gt=0)], Annotated[str, msgspec.Meta(min_length=1, max_length=3)],
    Annotated[float, msgspec.Meta(multiple_of=0.5)], Annotated[datetime, msgspec.Meta(tz=True)],
    Annotated[datetime, msgspec.Meta(tz=False)], Annotated[str, msgspec.Meta(pattern="^a+b?$")],
    Annotated[dict[str, int], msgspec.Meta(max_length=1)], frozenset[int],
]  # fmt: skip
WORDS = st.sampled_from(
    ["ok", "comment", "when", "tags", "firstName", "age", "type", "Card", "Cash", "number", "amount", "kids", "value",
     "x", "y", "at", "size", "colour", "red", "blue", "a", "aab", "1", "1.5", "", "2030-01-01", "12:00:00", "P1D",
     "2030-01-01T12:00:00", "2030-01-01T12:00:00Z", "00000000-0000-0000-0000-000000000001", "YQ=="]
)  # fmt: skip
ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    WORDS, st.text(max_size=5),
)  # fmt: skip
JSON = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=8
)


def fitting(wanted: Any) -> st.SearchStrategy[Any]:
    """Values that are made for a type: most of them fit, so that both verdicts are seen."""
    args = typing.get_args(wanted)
    fields: dict[Any, dict[str, Any]] = {
        Decision: {"ok": bool, "comment": str, "when": datetime | None, "tags": list[int]},
        Strict: {"firstName": str, "age": int},
        Card: {"type": Literal["Card"], "number": str},
        Tree: {"kids": list[int], "value": int | None},
        Point: {"x": float, "at": date},
        Options: {"size": int, "colour": Colour},
    }
    if isinstance(wanted, type) and wanted in fields:
        return st.fixed_dictionaries({}, optional={name: fitting(each) for name, each in fields[wanted].items()})
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(fitting, args))
    if origin in (list, set, frozenset):
        return st.lists(fitting(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(WORDS, fitting(args[1]), max_size=2)
    if origin is tuple or wanted in (Row, Pair):
        return st.lists(ATOMS, max_size=3)
    return {bool: st.booleans(), int: st.integers(), str: st.text(max_size=4), type(None): st.none()}.get(wanted, ATOMS)


@settings(max_examples=examples(3000, 150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(TYPES).flatmap(lambda wanted: st.tuples(st.just(wanted), fitting(wanted) | JSON)))
def test_what_the_schema_accepts_decodes_and_what_it_refuses_does_not(drawn: tuple[Any, Any]) -> None:
    wanted, payload = drawn
    kind = ValueType.of(wanted)
    schema = schema_of(kind)
    assert schema is not None
    data = msgspec.json.encode(payload)
    misfit = check_of(schema).misfit(msgspec.json.decode(data))
    try:
        kind.decode(data)
    except Exception as error:
        assert misfit is not None, error
    else:
        assert misfit is None


MODELS: list[Any] = [Order, Renamed, Lax, Wrapped, Closed, Listed, Lax | None, list[Closed], dict[str, Wrapped | int]]
OF_MODELS = st.dictionaries(
    st.sampled_from(
        ["item", "theItem", "count", "lines", "ok", "amount", "when", "size", "colour", "x", "y", "age", "value", "lax"]
    ),
    JSON | st.sampled_from(["yes", "12.50", 1700000000, 5.0, "5", 0, 1, True, [], {}, None]),
    max_size=4,
)


@settings(max_examples=examples(3000, 150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(MODELS),
    OF_MODELS | JSON | st.lists(OF_MODELS, max_size=2) | st.fixed_dictionaries({"ok": st.just(True)}, optional={
        "lax": OF_MODELS, "when": JSON, "count": JSON, "amount": JSON, "size": JSON, "colour": JSON,
    }),
)  # fmt: skip
def test_what_pydantic_reads_is_never_refused(wanted: Any, payload: Any) -> None:
    kind = ValueType.of(wanted)
    schema = schema_of(kind)
    data = msgspec.json.encode(payload)
    try:
        kind.decode(data)
    except Exception:
        return
    assert schema is None or check_of(schema).misfit(msgspec.json.decode(data)) is None


# ---- bounds


def test_a_schema_never_leads_out_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(socket, "socket", refuse)
    for reference in ("http://example.org/a.json", "file:///etc/passwd", "urn:a", "#/$defs/none", "other.json", "#"):
        check = check_of(msgspec.json.encode({"$ref": reference}).decode())
        assert check.misfit({"a": 1}) is None


@each(
    "schema",
    [
        "", "nonsense", "[]", "5", "null", '{"type": 5}', '{"type": "unknown"}', '{"properties": 5}',
        '{"$id": "http://example.org/", "type": "integer"}', '{"patternProperties": {"(a+)+$": {}}}', "[" * 100_000,
        '{"a": ' * 10_000, '{"type": "integer"' + " " * MAX_SCHEMA + "}", '{"enum": 5}', '{"multipleOf": 0}',
        '{"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}', '{"pattern": "("}', '{"minLength": "x"}',
    ],
)  # fmt: skip
def test_a_schema_that_is_not_understood_leaves_the_payload_to_the_worker(schema: str) -> None:
    assert check_of(schema).misfit("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!") is None


def _alternatives(depth: int) -> Any:
    value: Any = 5
    for _ in range(depth):
        value = {"kid": value}
    return value


SLOW: list[tuple[str, Mapping[str, Any], Any]] = [
    ("nested repetitions", {"type": "string", "pattern": "^(a+)+$"}, "a" * 5000 + "!"),
    ("alternatives in a repetition", {"type": "string", "pattern": "^(ab|ab)*$"}, "ab" * 5000 + "!"),
    ("many repetitions", {"type": "string", "pattern": "a*a*a*a*a*a*b"}, "a" * 60_000),
    ("one repetition", {"type": "string", "pattern": "a*b"}, "a" * 60_000),
    ("a counted repetition", {"type": "string", "pattern": "(a?){50}a{50}"}, "a" * 49),
    ("a group again", {"type": "string", "pattern": r"^(a+)\1+$"}, "a" * 40_000 + "!"),
    (
        "alternatives in alternatives",
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]},
                "b": {"type": "object", "properties": {"kid": {"$ref": "#/$defs/a"}}},
                "c": {"type": "object", "properties": {"kid": {"$ref": "#/$defs/a"}}, "required": ["kid"]},
            },
        },
        _alternatives(200),
    ),
    ("much of a set", {"type": "array", "uniqueItems": True}, [{"a": place} for place in range(5000)]),
    ("a long list", {"type": "array", "items": {"type": "integer"}}, [1] * 30_000),
    ("a deep list", {"type": "array", "items": {"$ref": "#"}}, _alternatives(900)),
]


@each(("name", "schema", "payload"), SLOW)
def test_a_check_takes_bounded_time(name: str, schema: Mapping[str, Any], payload: Any) -> None:
    begun = time.process_time()
    check_of(msgspec.json.encode(schema).decode()).misfit(payload)
    assert time.process_time() - begun < 3, name


def test_a_check_survives_a_caller_whose_stack_is_deep() -> None:
    schema = schema_of(ValueType.of(Tree))
    assert schema is not None
    check = check_of(schema)

    def at(level: int) -> None:
        if level:
            return at(level - 1)
        assert check.misfit({"kids": [5]}) is not None
        assert check.misfit(_alternatives(500) | {"kids": [_alternatives(500)]}) is None

    at(600)


@each(
    ("pattern", "is_searched"),
    [
        ("^[a-z]+@[a-z]+$", True), (r"^\d{4}-\d{2}$", True), ("^(ab|cd)$", True), (r"^(\d{3}-){2}\d{4}$", True),
        ("", True), ("(a+)+", False), ("(ab|b)*", False), ("(a{1,5}){1,5}", False), (r"(a)\1", False),
        ("(?=a)b", False), ("(", False), ("a" * 5000, False),
    ],
)  # fmt: skip
def test_only_patterns_that_cannot_take_long_are_searched(pattern: str, is_searched: bool) -> None:
    assert (longest_text(pattern) > 0) is is_searched
