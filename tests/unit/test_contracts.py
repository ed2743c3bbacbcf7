"""Signatures, values and codecs: what is stored reads back as it was given, and what cannot be is refused."""

# Functions are declared here for their annotations alone, and annotations are made at run time.
# mypy: disable-error-code="no-untyped-def,empty-body,valid-type,misc"

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import pickle
import subprocess
import sys
import traceback
import typing
import zlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from inspect import Parameter
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, NamedTuple, NoReturn, NotRequired, Optional, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.contracts.codecs import CannotDecode, Codecs, shown
from flowfabric.contracts.json_types import annotation_text
from flowfabric.contracts.signature import Signature
from flowfabric.contracts.value_types import ValueType
from flowfabric.errors import Corruption, InvalidInput

T = TypeVar("T")
SECRET = "s3cr3t"


class Context:
    pass


class OtherContext(Generic[T]):
    pass


CONTEXTS = (Context, OtherContext)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Word(StrEnum):
    YES = "yes"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Point3(Point):
    z: int = 0


@dataclasses.dataclass(eq=False)
class Opaque:
    x: int
    inner: list[Point] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Basket:
    items: Sequence[str] = ()
    seen: AbstractSet[int] = frozenset()


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


@dataclasses.dataclass
class Tree:
    name: str
    children: list[Tree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Positive:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError(f"negative: {SECRET}")


class Job(msgspec.Struct):
    name: str
    at: datetime | None = None
    points: list[Point] = []


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    name: str


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    a: int


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: int
    right: str = "r"


class Address(pydantic.BaseModel):
    street: str
    since: date | None = None


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(alias="fullName", default="nobody")
    homes: list[Address] = []
    mood: Colour = Colour.RED
    born: datetime | None = None
    _cache: object = pydantic.PrivateAttr(default_factory=object)

    @pydantic.computed_field
    @property
    def initials(self) -> str:
        return self.name[:1]


class StrictModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    when: datetime
    parts: tuple[int, ...] = ()


class Kitten(pydantic.BaseModel):
    kind: Literal["kitten"] = "kitten"
    lives: int


class Puppy(pydantic.BaseModel):
    kind: Literal["puppy"] = "puppy"
    lives: int


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr


class Hidden(pydantic.BaseModel):
    seen: int
    unseen: int = pydantic.Field(default=0, exclude=True)


class Reading(pydantic.BaseModel):
    value: float | None


@pydantic.dataclasses.dataclass
class Amount:
    cents: int = pydantic.Field(gt=0)


@dataclasses.dataclass
class Invoice:
    amount: Amount


@dataclasses.dataclass
class Customer:
    person: Person
    address: Address | None = None


UserId = typing.NewType("UserId", int)
Pet = Annotated[Kitten | Puppy, pydantic.Field(discriminator="kind")]


def cases(table: list[tuple[Any, ...]]) -> list[Any]:
    """Rows as parameters whose ids are the same in every process, whatever the values are."""
    return [pytest.param(*row, id=f"{number}-{annotation_text(row[0])}") for number, row in enumerate(table)]


def there_and_back(annotation: Any, value: Any) -> Any:
    kind = ValueType.of(annotation)
    data = kind.encode(value)
    if data is not None:
        json.loads(data)
    return kind.decode(data)


# Values that fit: annotation, value, what is read where that is not the value itself.
SAME = object()
FITTING: list[tuple[Any, Any, Any]] = [
    (Any, {"a": [1, 2.5, "x", None, True, {}]}, SAME),
    (Parameter.empty, [1], SAME),
    (object, "x", SAME),
    (None, None, SAME),
    (NoReturn, None, SAME),
    (typing.LiteralString, "x", SAME),
    (bool, True, SAME),
    (int, -(2**63), SAME),
    (int, 2**64 - 1, SAME),
    (int, 10**100, SAME),
    (Any, 10**100, SAME),
    (float, 1e308, SAME),
    (float, 5e-324, SAME),
    (float, 3, 3.0),
    (int | float, 3, SAME),
    (int | float, 3.0, SAME),
    (Decimal | float, 0.1, SAME),
    (Decimal, Decimal("1.10"), SAME),
    (Decimal, Decimal("-Infinity"), SAME),
    (Decimal, 3, Decimal(3)),
    (str, "\0 ü \U0001f600 \u2028", SAME),
    (str, Word.YES, "yes"),
    (Any, Word.YES, "yes"),
    (bytes, b"\x00\xff", SAME),
    (bytes, bytearray(b"x"), b"x"),
    (bytes | None, b"", SAME),
    (datetime, datetime(2024, 2, 29, 12, 0, 0, 1), SAME),
    (datetime, datetime(2024, 2, 29, tzinfo=UTC), SAME),
    (datetime, datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=-3, minutes=-30))), SAME),
    (datetime, datetime(2024, 7, 1, tzinfo=ZoneInfo("Europe/Berlin")), SAME),
    (date, date(1, 1, 1), SAME),
    (time, time(23, 59, 59, 999999, tzinfo=UTC), SAME),
    (timedelta, timedelta(days=-1, microseconds=1), SAME),
    (UUID, UUID(int=5), SAME),
    (Path, Path("/a/b"), SAME),
    (PurePosixPath, PurePosixPath("a"), SAME),
    (Colour, Colour.BLUE, SAME),
    (Level, Level.HIGH, SAME),
    (Literal["a", 1, None], 1, SAME),
    (Optional[Colour], None, SAME),  # noqa: UP045 - the other spelling
    (int | str | None, "1", SAME),
    (list[int] | dict[str, int] | None, {"a": 1}, SAME),
    (list[list[datetime]], [[datetime(2024, 1, 1)]], SAME),
    (tuple[int, str], (1, "a"), SAME),
    (tuple[UUID, ...], (UUID(int=1),), SAME),
    (tuple[()], (), SAME),
    (Any, (1, 2), [1, 2]),
    (Any, {"a": [(1,)]}, {"a": [[1]]}),
    (list[int], (1, 2), [1, 2]),
    (tuple[int, ...], [1], (1,)),
    (set[date], {date(2024, 1, 1)}, SAME),
    (frozenset[int], frozenset({1}), SAME),
    (dict[int, str], {1: "a"}, SAME),
    (dict[UUID, dict[date, float]], {UUID(int=1): {date(2024, 1, 1): 1.5}}, SAME),
    (dict[Colour, int], {Colour.RED: 1}, SAME),
    (dict[str, int], OrderedDict(a=1), {"a": 1}),
    (dict[str, int], Counter("aab"), {"a": 2, "b": 1}),
    (Sequence[int], (1, 2), [1, 2]),
    (Sequence[int], [1, 2], SAME),
    (Iterable[int], (1, 2), [1, 2]),
    (Collection[int], {1, 2}, [1, 2]),
    (AbstractSet[int], frozenset({1}), {1}),
    (Mapping[str, int], MappingProxyType({"a": 1}), {"a": 1}),
    (dict[str, Sequence[int]], {"a": (1,)}, {"a": [1]}),
    (typing.Sequence[int], (1,), [1]),
    (Sequence, (1,), [1]),
    (UserId, UserId(3), SAME),
    (Annotated[int, "a note"], 3, SAME),
    (Annotated[int, ["cannot be hashed"]], 3, SAME),
    (Annotated[int, msgspec.Meta(ge=0)], 3, SAME),
    (Annotated[Sequence[int], "a note"], (3,), [3]),
    (T, 1, SAME),
    (Point, Point(1, 2.5), SAME),
    (Point3, Point3(1, 2.0, 3), SAME),
    (Basket, Basket(("a",), frozenset({1})), Basket(["a"], {1})),
    (Basket, Basket(), Basket([], set())),
    (Box[int], Box(1), SAME),
    (Box[list[UUID]], Box([UUID(int=1)]), SAME),
    (Tree, Tree("a", [Tree("b"), Tree("c", [Tree("d")])]), SAME),
    (Job, Job("a", datetime(2024, 1, 1, tzinfo=UTC), [Point(1)]), SAME),
    (Cat | Dog | None, Dog("rex"), SAME),
    (Movie, {"title": "x"}, SAME),
    (Movie, {"title": "x", "year": 1999}, SAME),
    (Pair, Pair(1), SAME),
    (Address, Address(street="x", since=date(2024, 1, 1)), SAME),
    (Address | None, None, SAME),
    (StrictModel, StrictModel(when=datetime(2024, 1, 1), parts=(1, 2)), SAME),
    (dict[str, list[Address]], {"a": [Address(street="x")]}, SAME),
    (Kitten | Puppy, Puppy(lives=1), SAME),
    (Kitten | Puppy | None, None, SAME),
    (list[Pet], [Puppy(lives=1), Kitten(lives=9)], SAME),
    (Address | int, 3, SAME),
    (Annotated[int, pydantic.Field(gt=0)], 3, SAME),
    (pydantic.PositiveInt, 3, SAME),
    (pydantic.HttpUrl, pydantic.HttpUrl("https://example.org/a"), SAME),
    (Amount, Amount(cents=3), SAME),
    (list[Amount], [Amount(cents=3)], SAME),
    (Reading, Reading(value=None), SAME),
]


@pytest.mark.parametrize(("annotation", "value", "read"), cases(FITTING))
def test_a_value_that_fits_reads_back_in_the_type_of_its_annotation(annotation: Any, value: Any, read: Any) -> None:
    expected = value if read is SAME else read

    back = there_and_back(annotation, value)

    assert back == expected
    assert type(back) is type(expected)


@pytest.mark.parametrize(("annotation", "value", "read"), cases(FITTING))
def test_an_argument_that_fits_reads_back_the_same_way(annotation: Any, value: Any, read: Any) -> None:
    def task(thing): ...

    task.__annotations__["thing"] = annotation
    signature = Signature.of(task, context_types=CONTEXTS)

    assert signature.decode(signature.encode((value,), {})) == {"thing": value if read is SAME else read}


def test_a_moment_in_the_hour_that_happens_twice_keeps_its_moment_and_offset() -> None:
    second = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))

    back = there_and_back(datetime, second)

    assert (back.isoformat(), back.utcoffset()) == ("2024-10-27T02:30:00+01:00", timedelta(hours=1))
    assert there_and_back(list[datetime], [second]) == [back]


def test_a_decimal_nan_reads_back_as_one() -> None:
    assert there_and_back(Decimal, Decimal("nan")).is_nan()
    assert there_and_back(Box[Decimal], Box(Decimal("nan"))).content.is_nan()


def test_objects_that_do_not_compare_are_compared_by_their_fields() -> None:
    back = there_and_back(Opaque, Opaque(1, [Point(2)]))

    assert (type(back), back.x, back.inner) == (Opaque, 1, [Point(2)])


def test_private_attributes_of_a_model_are_ignored() -> None:
    person = Person(fullName="Ada", homes=[Address(street="x")], born=datetime(2024, 1, 1, tzinfo=UTC))

    back = there_and_back(Person, person)

    assert back != person  # the private attribute is an object of its own
    assert back.model_dump() == person.model_dump()
    assert there_and_back(Customer, Customer(person)).person.name == "Ada"


def test_a_model_is_stored_by_its_field_names_and_read_by_alias_too() -> None:
    kind = ValueType.of(Person)

    assert json.loads(kind.encode(Person(fullName="Ada")) or b"")["name"] == "Ada"
    assert kind.decode(b'{"fullName":"Ada"}').name == "Ada"


def test_defaults_of_classes_are_filled_in_when_reading() -> None:
    assert ValueType.of(Point).decode(b'{"x":1}') == Point(1, 0.0)
    assert ValueType.of(Job).decode(b'{"name":"a"}') == Job("a")
    assert ValueType.of(Address).decode(b'{"street":"a"}') == Address(street="a")
    assert ValueType.of(Pair).decode(b"[1]") == Pair(1)
    assert ValueType.of(Opaque).decode(b'{"x":1}').inner == []


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def in_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


class NeverCompares:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError(SECRET)

    __hash__ = None  # type: ignore[assignment]  # comparing is what this class is for


@dataclasses.dataclass(eq=False)
class Grumpy:
    x: int

    def __eq__(self, other: object) -> bool:
        raise RuntimeError(SECRET)

    __hash__ = None  # type: ignore[assignment]


# Values that do not fit: annotation, value, words of the problem.
MISFITS: list[tuple[Any, Any, str]] = [
    (int, "1", "a str does not fit (expected `int`, got `str`)"),
    (int, True, "got `bool`"),
    (int, 1.0, "got `float`"),
    (int, None, "None does not fit"),
    (str, 1, "an int does not fit"),
    (str, b"x", "would read back different: a bytes becomes a str"),
    (bytes, "eA==", "a str becomes a bytes"),
    (bool, 1, "got `int`"),
    (None, 1, "expected `null`, got `int`"),
    (float, math.nan, "nan has no JSON form"),
    (float | None, math.nan, "nan has no JSON form"),
    (Any, math.inf, "inf has no JSON form"),
    (list[float], [0.0, -math.inf], "-inf has no JSON form, at [1]"),
    (Point, Point(1, math.nan), "nan has no JSON form, at .y"),
    (Reading, Reading(value=math.nan), "nan has no JSON form at .value"),
    (float, 2**53 + 1, "an int becomes a float"),
    (Decimal, 0.1, "a float becomes a Decimal"),
    (Decimal, "1.5", "a str becomes a Decimal"),
    (int, 10**5000, "cannot be written as JSON (ValueError)"),
    (str, "\ud800", "text with a lone surrogate"),
    (dict[str, int], {"\udfff": 1}, "text with a lone surrogate"),
    (Any, {1: 2}, "the keys change"),
    (dict, {1: 2}, "the keys change"),
    (dict[Any, int], {1: 1, "1": 2}, "the keys change"),
    (dict[str, int], {1: 2}, "the keys change"),
    (dict[str, int], {(1, 2): 3}, "a key that is a tuple has no JSON form"),
    (Any, {None: 1}, "a key that is a NoneType has no JSON form"),
    (Any, datetime(2024, 1, 1), "a datetime becomes a str"),
    (Any, UUID(int=1), "an UUID becomes a str"),
    (Any, Decimal("1"), "a Decimal becomes a str"),
    (Any, {1}, "a set becomes a list"),
    (Any, Point(1), "a Point becomes a dict"),
    (Any, Path("x"), "becomes a str"),
    (Any, object(), "object has no JSON form"),
    (Any, 1j, "complex has no JSON form"),
    (Any, nested(100_000), "nested too deep"),
    (list[Any], in_itself(), "nested too deep"),
    (Any, NeverCompares(), "NeverCompares has no JSON form"),
    (Grumpy, Grumpy(1), "cannot be compared (RuntimeError)"),
    (list[int], [1, "2"], "expected `int`, got `str` at [1]"),
    (tuple[int, int], (1, 2, 3), "expected `array` of length 2"),
    (set[int], [1, 1], "a list becomes a set"),
    (list[int], iter([1]), "has no JSON form"),
    (Collection[int], "12", "expected `array`, got `str`"),
    (date, datetime(2024, 1, 1), "does not fit"),
    (datetime, "2024-01-01T00:00:00", "a str becomes a datetime"),
    (datetime, datetime(2024, 1, 1, tzinfo=timezone(timedelta(seconds=30))), "a datetime changes"),
    (UUID, "no-uuid", "invalid UUID"),
    (Colour, "red", "a str becomes a Colour"),
    (Colour, SECRET, "a value that is not allowed"),
    (Literal["a", "b"], "c", "a value that is not allowed"),
    (int | None, "x", "expected `int | null`, got `str`"),
    (Annotated[int, msgspec.Meta(ge=0)], -1, "expected `int` >= 0"),
    (Annotated[int, pydantic.Field(gt=0)], -1, "greater_than"),
    (Point, {"x": 1, "y": 0.0}, "a dict becomes a Point"),
    (Point, Point3(1), "a Point3 becomes a Point"),
    (Point, Point("1"), "expected `int`, got `str` at .x"),  # type: ignore[arg-type]
    (Positive, {"x": -1}, "ValueError in its class"),
    (Tree, Tree("a", [Tree("b", [Tree(1)])]), "expected `str`, got `int` at .children[0].children[0].name"),  # type: ignore[arg-type]
    (Cat | Dog, Strict(1), "missing required field `type`"),
    (Strict, {"a": 1, SECRET: 2}, "an unknown field"),
    (Movie, {"title": "x", "more": 1}, "the keys change"),
    (Movie, {}, "missing required field `title`"),
    (Address, {"street": "x"}, "a dict becomes an Address"),
    (Address, Address.model_construct(street=5), "Address: string_type"),
    (list[Address], [Address.model_construct(street=5)], "Address: string_type at [0]"),
    (Kitten | Puppy, 3, "a"),
    (Login, Login(password=pydantic.SecretStr(SECRET)), "a SecretStr changes at .password"),
    (Hidden, Hidden(seen=1, unseen=2), "an int changes at .unseen"),
    (Path, 1, "TypeError in its class"),
    (Path, "x", "becomes a PosixPath"),
]


@pytest.mark.parametrize(("annotation", "value", "words"), cases(MISFITS))
def test_a_result_that_does_not_fit_is_refused_without_showing_it(annotation: Any, value: Any, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ValueType.of(annotation).encode(value)

    assert caught.value.field == "result"
    assert words in caught.value.problem
    assert caught.value.allowed
    assert SECRET not in "".join(traceback.format_exception(caught.value, chain=True))
    assert caught.value.__context__ is None


@pytest.mark.parametrize(("annotation", "value", "words"), cases(MISFITS))
def test_an_argument_that_does_not_fit_is_named(annotation: Any, value: Any, words: str) -> None:
    def task(good: int, bad, other: str = ""): ...

    task.__annotations__["bad"] = annotation
    signature = Signature.of(task, context_types=CONTEXTS)

    with pytest.raises(InvalidInput) as caught:
        signature.encode((1, value), {"other": "x"})

    assert caught.value.field == "bad"
    assert words in caught.value.problem
    assert SECRET not in str(caught.value)


def test_the_refusal_says_what_is_allowed() -> None:
    with pytest.raises(InvalidInput) as caught:
        ValueType.of(dict[str, int | None]).encode([])
    assert caught.value.allowed == "dict[str, int | None]"
    with pytest.raises(InvalidInput) as annotated:
        ValueType.of(Annotated[Optional[pydantic.PositiveInt], "a note"]).encode("x")  # noqa: UP045
    assert annotated.value.allowed == "int | None"

    with pytest.raises(InvalidInput, match="annotate"):
        ValueType.of(Any).encode({1, 2})


def test_a_type_that_accepts_none_stores_nothing_for_it() -> None:
    assert ValueType.of(int | None).encode(None) is None
    assert ValueType.of(Any).encode(None) is None
    assert ValueType.of(int).decode(None) is None
    assert ValueType.of(int | None).encode(0) == b"0"


def test_the_caller_names_what_is_written_and_read() -> None:
    with pytest.raises(InvalidInput) as refused:
        ValueType.of(int).encode("x", field="step 'write'")
    assert refused.value.field == "step 'write'"

    with pytest.raises(CannotDecode, match="step 'write': does not fit int") as unread:
        ValueType.of(int).decode(b'"x"', what="step 'write'")
    assert unread.value.what == "step 'write'"


# Stored data that no longer fits: annotation, data, words of the problem.
UNREADABLE: list[tuple[Any, bytes, str]] = [
    (int, b'"s3cr3t"', "expected `int`, got `str`"),
    (int, b"", "truncated"),
    (int, b"1 s3cr3t", "JSON is malformed"),
    (int, b"\xff", "JSON is malformed"),
    (str, b'"\xff"', "text that is not UTF-8"),
    (Any, b"[" * 100_000, "nested too deep"),
    (float, b"1e999", "number out of range"),
    (Colour, b'"s3cr3t"', "a value that is not allowed"),
    (list[Literal["a"]], b'["s3cr3t"]', "a value that is not allowed at [0]"),
    (dict[int, int], b'{"s3cr3t":1}', "expected `int`, got `str` at a key of the top"),
    (Point, b'{"y":1.5}', "missing required field `x`"),
    (Strict, b'{"a":1,"s3cr3t":1}', "an unknown field"),
    (Positive, b'{"x":-1}', "ValueError in its class"),
    (list[Positive], b'[{"x":-1}]', "ValueError in its class at [0]"),
    (Cat | Dog, b'{"type":"s3cr3t"}', "a value that is not allowed"),
    (Address, b'{"street":["s3cr3t"]}', "Address: string_type"),
    (Person, b'{"s3cr3t":1}', "Person: extra_forbidden"),
    (list[Pet], b'[{"kind":"s3cr3t"}]', "union_tag_invalid at [0]"),
    (Amount, b'{"cents":-1}', "Amount: greater_than"),
    (Amount, b"{}", "Amount: missing"),
    (Path, b"1", "TypeError in its class"),
    (UUID, b'"s3cr3t"', "invalid UUID"),
    (bytes, b'"s3cr3t"', "invalid base64"),
    (Decimal, b'"s3cr3t"', "invalid decimal"),
    (timedelta, b'"s3cr3t"', "invalid ISO8601"),
    (datetime, b'"s3cr3t"', "invalid RFC3339"),
]


@pytest.mark.parametrize(("annotation", "data", "words"), cases(UNREADABLE))
def test_stored_data_that_no_longer_fits_is_named_and_not_shown(annotation: Any, data: bytes, words: str) -> None:
    with pytest.raises(CannotDecode) as caught:
        ValueType.of(annotation).decode(data)

    assert str(caught.value).startswith("result: ")
    assert words in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value, chain=True))
    assert caught.value.__context__ is None


def test_cannot_decode_is_a_corruption_and_survives_pickling() -> None:
    error = CannotDecode("is gone", what="argument 'x'", execution_id="e")

    copy: CannotDecode = pickle.loads(pickle.dumps(error))

    assert issubclass(type(copy), Corruption)
    assert (str(copy), copy.what, copy.problem, copy.execution_id) == (str(error), "argument 'x'", "is gone", "e")


# Annotations JSON cannot serve: the annotation, words of the problem.
REFUSED_TYPES: list[tuple[Any, str]] = [
    (Callable[[int], int], "Callable has no JSON form"),
    (complex, "complex has no JSON form"),
    (NeverCompares, "NeverCompares has no JSON form"),
    (list[dict[str, complex]], "complex has no JSON form"),
    (Box[complex], "complex has no JSON form"),
    (type[int], "type has no JSON form"),
    (Iterator[int], "Iterator has no JSON form"),
    (dict[tuple[int, int], int], "keys of dict[tuple[int, int], int] have no JSON form"),
    (dict[bool, int], "keys"),
    (dict[str | None, int], "keys"),
    (str | bytes, "may not contain more than one str-like type"),
    (Point | Tree, "may not contain more than one dataclass"),
    (list[int] | set[int], "may not contain more than one array-like"),
    (Invoice, "pydantic dataclass"),
    (typing.AnyStr, "constraints"),
]


@pytest.mark.parametrize(("annotation", "words"), cases(REFUSED_TYPES))
def test_a_type_json_cannot_express_is_refused_when_declared(annotation: Any, words: str) -> None:
    with pytest.raises(InvalidInput) as of_value:
        ValueType.of(annotation)
    assert words in of_value.value.problem

    def takes(good: int, bad): ...
    def returns(good: int): ...

    takes.__annotations__["bad"] = annotation
    returns.__annotations__["return"] = annotation
    for fn, field in ((takes, "bad"), (returns, "return")):
        with pytest.raises(InvalidInput) as caught:
            Signature.of(fn, context_types=CONTEXTS)
        assert caught.value.field == field
        assert fn.__name__ in caught.value.problem
        assert words in caught.value.problem


def test_one_annotation_has_one_type() -> None:
    assert ValueType.of(dict[str, int]) is ValueType.of(dict[str, int])
    assert ValueType.of(Literal[1]) is not ValueType.of(Literal[True])
    assert ValueType.of(Annotated[int, []]).encode(1) == b"1"


def test_the_type_of_a_result_is_read_from_a_function() -> None:
    async def waits() -> int: ...
    def later() -> Awaitable[UUID]: ...
    def untyped(): ...

    class Service:
        def call(self) -> Point: ...
        async def __call__(self) -> date: ...

    assert ValueType.returned_by(waits) is ValueType.of(int)
    assert ValueType.returned_by(waits) is ValueType.of(int)
    assert ValueType.returned_by(later) is ValueType.of(UUID)
    assert ValueType.returned_by(untyped) is ValueType.of(Any)
    assert ValueType.returned_by(Service().call) is ValueType.of(Point)
    assert ValueType.returned_by(Service()) is ValueType.of(date)
    assert ValueType.returned_by(functools.partial(waits)) is ValueType.of(int)
    assert ValueType.returned_by(lambda: 1) is ValueType.of(Any)
    assert ValueType.returned_by("x".join) is ValueType.of(Any)
    assert ValueType.returned_by(max) is ValueType.of(Any)


async def publish(ctx: Context, draft_id: int, title: str = "none", *, when: datetime | None = None) -> str: ...


PUBLISH = Signature.of(publish, context_types=CONTEXTS)


def test_a_signature_is_read_from_string_annotations() -> None:
    assert publish.__annotations__["draft_id"] == "int"  # this module keeps its annotations as text

    assert (PUBLISH.name, PUBLISH.context_param, PUBLISH.is_async) == ("publish", "ctx", True)
    assert PUBLISH.result is ValueType.of(str)
    shown = [(p.name, p.annotation, p.required, p.is_keyword_only) for p in PUBLISH.parameters]
    assert shown == [
        ("draft_id", "int", True, False),
        ("title", "str", False, False),
        ("when", "datetime.datetime | None", False, True),
    ]
    assert PUBLISH.parameters[1].default == "none"
    assert repr(PUBLISH) == "Signature(publish(draft_id: int, title: str, when: datetime.datetime | None) -> str)"


@pytest.mark.parametrize(
    ("args", "kwargs", "stored"),
    [
        ((1,), {}, {"draft_id": 1}),
        ((1, "t"), {}, {"draft_id": 1, "title": "t"}),
        ((), {"title": "t", "draft_id": 1}, {"draft_id": 1, "title": "t"}),
        ((1,), {"when": None}, {"draft_id": 1, "when": None}),
        ((1, "none"), {}, {"draft_id": 1, "title": "none"}),
        ((1,), {"when": datetime(2024, 1, 1)}, {"draft_id": 1, "when": "2024-01-01T00:00:00"}),
    ],
)
def test_only_the_arguments_given_are_stored_by_name(
    args: tuple[Any, ...], kwargs: dict[str, Any], stored: dict[str, Any]
) -> None:
    data = PUBLISH.encode(args, kwargs)

    assert json.loads(data) == stored
    names = dict(zip(("draft_id", "title"), args, strict=False)) | kwargs
    assert PUBLISH.decode(data) == names


@pytest.mark.parametrize(
    ("args", "kwargs", "field", "words"),
    [
        ((), {}, "draft_id", "missing"),
        ((), {"title": "t"}, "draft_id", "missing"),
        ((1, "t", None), {}, "arguments", "3 positional arguments"),
        ((1,), {"draft_id": 2}, "draft_id", "twice"),
        ((1,), {"titel": "t"}, "titel", "not an argument of publish"),
        ((1,), {"ctx": 1}, "ctx", "not an argument of publish"),
        (("1",), {}, "draft_id", "a str does not fit"),
        ((1, 2), {}, "title", "an int does not fit"),
        ((1,), {"when": "2024-01-01"}, "when", "does not fit"),
        ((), {"title": 1, "titel": 1}, "titel", "not an argument"),
    ],
)
def test_a_call_that_does_not_bind_names_the_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        PUBLISH.encode(args, kwargs)

    assert caught.value.field == field
    assert words in caught.value.problem
    assert caught.value.allowed


@pytest.mark.parametrize(
    ("data", "what", "words"),
    [
        (b"{}", "argument 'draft_id'", "missing"),
        (b'{"draft_id":"s3cr3t"}', "argument 'draft_id'", "does not fit int (expected `int`, got `str`)"),
        (b'{"draft_id":1,"when":"s3cr3t"}', "argument 'when'", "invalid RFC3339"),
        (b'{"draft_id":1,"old":"s3cr3t"}', "argument 'old'", "publish takes no such argument"),
        (b'{"draft_id":null}', "argument 'draft_id'", "got `null`"),
        (b'["s3cr3t"]', "arguments of publish", "not a JSON object"),
        (b"s3cr3t", "arguments of publish", "not a JSON object"),
        (b"", "arguments of publish", "not a JSON object"),
        (b'{"draft_id":' + b"[" * 100_000, "arguments of publish", "not a JSON object"),
        (b'{"draft_id":1,"title":"\xff"}', "argument 'title'", "UTF-8"),
    ],
)
def test_stored_arguments_that_no_longer_fit_are_named_and_not_shown(data: bytes, what: str, words: str) -> None:
    with pytest.raises(CannotDecode) as caught:
        PUBLISH.decode(data)

    assert caught.value.what == what
    assert words in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value, chain=True))


def test_names_that_python_uses_itself_are_ordinary_arguments() -> None:
    def task(self: int, cls: int, a0: int, __init__: int, __struct_fields__: int = 0) -> None: ...

    signature = Signature.of(task, context_types=CONTEXTS)
    given = {"self": 1, "cls": 2, "a0": 3, "__init__": 4, "__struct_fields__": 5}

    assert signature.decode(signature.encode((), given)) == given


def test_a_function_without_arguments_stores_an_empty_object() -> None:
    def task() -> None: ...

    signature = Signature.of(task, context_types=CONTEXTS)

    assert signature.encode((), {}) == b"{}"
    assert signature.decode(b"{}") == {}
    assert (signature.is_async, signature.context_param, signature.result.encode(None)) == (False, None, None)
    with pytest.raises(InvalidInput, match="no arguments"):
        signature.encode((), {"x": 1})
    with pytest.raises(InvalidInput, match="at most 0"):
        signature.encode((1,), {})


def with_context(ctx: Context, x: int) -> None: ...
def with_context_last(x: int, *, ctx: Context) -> None: ...
def with_optional_context(ctx: Context | None, x: int) -> None: ...
def with_old_optional_context(x: int, ctx: Optional[Context] = None) -> None: ...  # noqa: UP045, RUF100
def with_annotated_context(ctx: Annotated[Context, "a note"], x: int) -> None: ...
def with_generic_context(ctx: OtherContext[int], x: int) -> None: ...


@pytest.mark.parametrize(
    "fn",
    [
        with_context,
        with_context_last,
        with_optional_context,
        with_old_optional_context,
        with_annotated_context,
        with_generic_context,
    ],
)
def test_the_context_is_found_by_its_annotation_and_is_no_argument(fn: Callable[..., Any]) -> None:
    signature = Signature.of(fn, context_types=CONTEXTS)

    assert signature.context_param == "ctx"
    assert [each.name for each in signature.parameters] == ["x"]
    assert signature.encode((5,), {}) == b'{"x":5}'


def two_contexts(a: Context, b: Context) -> None: ...
def any_positional(*args: int) -> None: ...
def any_named(**kwargs: int) -> None: ...
def many_contexts(*args: Context) -> None: ...
def positional_only(x: int, /) -> None: ...
def unknown_name(good: int, x: Missing) -> None: ...  # type: ignore[name-defined] # noqa: F821
def unknown_result(good: int) -> list[Missing]: ...  # type: ignore[name-defined] # noqa: F821
def broken(x: int[str]) -> None: ...  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("fn", "field", "words"),
    [
        (two_contexts, "b", "second context"),
        (any_positional, "args", "any number of positional"),
        (any_named, "kwargs", "any number of named"),
        (many_contexts, "args", "any number of positional"),
        (positional_only, "x", "positional-only"),
        (unknown_name, "x", "'Missing' cannot be resolved (NameError"),
        (unknown_result, "return", "cannot be resolved"),
        (broken, "x", "cannot be resolved"),
        (Point, "fn", "not a function"),
        (3, "fn", "not a function"),
        (max, "fn", "no signature"),
    ],
)
def test_a_function_that_cannot_be_a_task_is_refused_by_parameter(fn: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Signature.of(fn, context_types=CONTEXTS)

    assert caught.value.field == field
    assert words in caught.value.problem
    assert caught.value.allowed


def test_generators_are_refused() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    async def later():
        yield 1

    class Source:
        def __call__(self):
            yield 1

    for fn in (numbers, later, functools.partial(numbers), Source()):
        with pytest.raises(InvalidInput, match="is a generator"):
            Signature.of(fn, context_types=CONTEXTS)


def test_methods_partials_wrappers_and_callable_objects_are_functions_too() -> None:
    class Service:
        async def call(self, x: Point) -> int: ...
        async def __call__(self, x: Point) -> int: ...

    async def task(y: str, x: Point) -> int: ...

    @functools.wraps(task)
    async def wrapped(*args: Any, **kwargs: Any) -> Any: ...

    for fn in (Service().call, Service(), functools.partial(task, "y"), functools.partial(wrapped, "y")):
        signature = Signature.of(fn, context_types=CONTEXTS)
        assert signature.is_async
        assert signature.encode((Point(1),), {}) == b'{"x":{"x":1,"y":0.0}}'
        assert signature.result is ValueType.of(int)


def test_names_of_the_enclosing_function_can_be_annotations() -> None:
    class Local(msgspec.Struct):
        x: int

    def task(local: Local) -> None:
        Local(1)

    signature = Signature.of(task, context_types=CONTEXTS)

    assert signature.decode(b'{"local":{"x":1}}') == {"local": Local(1)}


def test_a_signature_has_a_json_schema() -> None:
    def task(
        ctx: Context, who: Person, pet: Pet, point: Point, path: Path = Path("a"), n: int = 3, odd: float = math.nan
    ) -> None: ...

    schema = Signature.of(task, context_types=CONTEXTS).json_schema()

    json.dumps(schema)
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["who", "pet", "point"]
    assert schema["properties"]["n"] == {"type": "integer", "default": 3}
    assert schema["properties"]["path"] == {"type": "string", "format": "path", "default": "a"}
    assert schema["properties"]["odd"] == {"type": "number"}  # JSON has no word for its default
    assert schema["properties"]["point"] == {"$ref": "#/$defs/Point"}
    assert schema["properties"]["who"]["properties"]["homes"]["items"] == {"$ref": "#/$defs/Address"}
    assert {"Point", "Address", "Kitten", "Puppy"} <= schema["$defs"].keys()


def test_pydantic_is_not_imported_for_tasks_that_do_not_use_it() -> None:
    code = (
        "import sys, dataclasses\n"
        "from flowfabric.contracts.signature import Signature\n"
        "@dataclasses.dataclass\n"
        "class P:\n    x: int\n"
        "def f(p: P, n: int | None = None) -> list[P]: ...\n"
        "s = Signature.of(f, context_types=())\n"
        "assert s.decode(s.encode((P(1),), {})) == {'p': P(1)}\n"
        "assert s.json_schema()\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Random annotations with values that fit them.
Typed = tuple[Any, st.SearchStrategy[Any]]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
zones = st.sampled_from([None, UTC, timezone(timedelta(hours=5, minutes=45))])
KEYS: list[Typed] = [
    (str, text),
    (int, st.integers()),
    (UUID, st.uuids()),
    (date, st.dates()),
    (datetime, st.datetimes(timezones=zones)),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (Decimal, st.decimals(allow_nan=False)),
    (timedelta, st.timedeltas()),
    (bytes, st.binary(max_size=8)),
]
LEAVES: list[Typed] = [
    *KEYS,
    (bool, st.booleans()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (None, st.none()),
    (time, st.times(timezones=zones)),
    (Path, st.sampled_from([Path("a"), Path("/a/b")])),
    (Point, st.builds(Point, st.integers(), st.floats(allow_nan=False, allow_infinity=False))),
    (Job, st.builds(Job, text, st.none() | st.datetimes(timezones=zones))),
    (Movie, st.fixed_dictionaries({"title": text}, optional={"year": st.integers()})),
    (Pair, st.builds(Pair, st.integers(), text)),
    (Address, st.builds(Address, street=text, since=st.none() | st.dates())),
    (Cat | Dog, st.builds(Cat, st.integers()) | st.builds(Dog, text)),
    (Kitten | Puppy, st.builds(Kitten, lives=st.integers()) | st.builds(Puppy, lives=st.integers())),
    (Tree, st.builds(Tree, text, st.lists(st.builds(Tree, text), max_size=2))),
]


def grown(children: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    def optional(inner: Typed) -> Typed:
        return inner[0] | None if inner[0] is not None else None, st.none() | inner[1]

    def pair(both: tuple[Typed, Typed]) -> Typed:
        (one, ones), (two, twos) = both
        return tuple[one, two], st.tuples(ones, twos)

    def mapping(both: tuple[Typed, Typed]) -> Typed:
        (key, keys), (value, values) = both
        return dict[key, value], st.dictionaries(keys, values, max_size=3)

    return st.one_of(
        children.map(optional),
        children.map(lambda of: (list[of[0]], st.lists(of[1], max_size=3))),
        children.map(lambda of: (tuple[of[0], ...], st.lists(of[1], max_size=3).map(tuple))),
        children.map(lambda of: (Box[of[0]], of[1].map(Box))),
        st.sampled_from(KEYS).map(lambda of: (set[of[0]], st.sets(of[1], max_size=3))),
        st.sampled_from(KEYS).map(lambda of: (frozenset[of[0]], st.frozensets(of[1], max_size=3))),
        st.tuples(children, children).map(pair),
        st.tuples(st.sampled_from(KEYS), children).map(mapping),
    )


typed = st.recursive(st.sampled_from(LEAVES), grown, max_leaves=4)


@given(st.data())
def test_any_value_of_any_annotation_reads_back_equal(data: st.DataObject) -> None:
    annotation, values = data.draw(typed)
    value = data.draw(values)

    back = there_and_back(annotation, value)

    assert back == value
    assert type(back) is type(value)


@given(st.data())
def test_arguments_of_any_annotations_read_back_equal(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(typed, max_size=3))
    values = [data.draw(each[1]) for each in drawn]

    def task(a: Any = None, b: Any = None, c: Any = None): ...

    names = ["a", "b", "c"][: len(drawn)]
    task.__annotations__ |= {name: each[0] for name, each in zip(names, drawn, strict=True)}
    signature = Signature.of(task, context_types=CONTEXTS)
    split = data.draw(st.integers(0, len(values)))

    stored = signature.encode(tuple(values[:split]), dict(zip(names[split:], values[split:], strict=True)))

    assert signature.decode(stored) == dict(zip(names, values, strict=True))


odd = st.one_of(
    st.floats(),
    st.decimals(),
    st.integers(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.booleans(),
    st.dictionaries(st.integers() | text | st.none(), st.floats(), max_size=2),
    st.lists(st.floats() | text, max_size=2),
    st.sampled_from([Point3(1), Opaque(1), Person(), Word.YES, b"x", {1}, (1,), "red", Strict(1)]),
)


def listed(value: Any) -> Any:
    """A list and a tuple of the same are taken for equal: which of them comes back is the annotation's to say."""
    if isinstance(value, list | tuple):
        return [listed(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), {each.name: listed(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return {key: listed(each) for key, each in value.items()} if isinstance(value, dict) else value


@given(st.data())
def test_every_accepted_value_reads_back_equal(data: st.DataObject) -> None:
    annotation = data.draw(typed)[0]
    value = data.draw(odd | typed.flatmap(lambda other: other[1]))

    try:
        back = there_and_back(annotation, value)
    except InvalidInput:
        return

    assert listed(back) == listed(value) or (isinstance(value, Decimal) and value.is_nan() and back.is_nan())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_without_an_annotation_everything_json_can_hold_is_held(value: Any) -> None:
    assert repr(there_and_back(Parameter.empty, value)) == repr(value)  # the same types too


@given(st.sampled_from([each[0] for each in FITTING]), st.binary(max_size=40) | json_values.map(msgspec.json.encode))
def test_reading_any_bytes_gives_a_value_or_cannot_decode(annotation: Any, data: bytes) -> None:
    try:
        value = ValueType.of(annotation).decode(data)
    except CannotDecode:
        return

    assert there_and_back(annotation, value) == value


class Zip:
    name = "zip"

    def encode(self, data: bytes) -> bytes:
        return zlib.compress(data)

    def decode(self, data: bytes) -> bytes:
        return zlib.decompress(data)


class Base64:
    def __init__(self, name: str = "b64") -> None:
        self.name = name

    def encode(self, data: bytes) -> bytes:
        return self.name.encode() + base64.b64encode(data)

    def decode(self, data: bytes) -> bytes:
        if not data.startswith(self.name.encode()):
            raise ValueError(f"not ours: {data!r}")
        return base64.b64decode(data.removeprefix(self.name.encode()))


class Bound:
    """As authenticated encryption: what it wrote for one execution cannot be read for another."""

    binds: Literal[True] = True

    def __init__(self, name: str = "bound") -> None:
        self.name = name

    def encode(self, data: bytes, execution_id: UUID | None, /) -> bytes:
        return f"{self.name} for {execution_id}:".encode() + data

    def decode(self, data: bytes, execution_id: UUID | None, /) -> bytes:
        start = f"{self.name} for {execution_id}:".encode()
        if not data.startswith(start):
            raise ValueError("it belongs to another execution")
        return data.removeprefix(start)


class Broken:
    """Whatever it is asked, it answers `answer`, or raises it."""

    name = "broken"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _do(self, data: bytes) -> bytes:
        if isinstance(self.answer, BaseException):
            raise self.answer
        answer: bytes = self.answer
        return answer

    encode = decode = _do


def test_without_codecs_the_data_is_plain_json() -> None:
    assert Codecs().seal(b"[1]", None) == (b"[1]", None)
    assert Codecs([Zip()]).open(b"[1]", None, None) == b"[1]"
    assert Codecs([Zip()]).open(b"[1]", "json", None) == b"[1]"


def test_codecs_are_applied_in_order_and_undone_backwards() -> None:
    codecs = Codecs([Zip(), Base64()])

    data, encoding = codecs.seal(b'"payload"', None)

    assert encoding == "json+zip+b64"
    assert data == b"b64" + base64.b64encode(zlib.compress(b'"payload"'))
    assert codecs.open(data, encoding, None) == b'"payload"'


@given(st.binary(max_size=50), st.permutations([Zip(), Base64("one"), Base64("two")]), st.integers(0, 3))
def test_sealed_data_opens_to_what_it_was(data: bytes, order: list[Any], count: int) -> None:
    sealed, encoding = Codecs(order[:count]).seal(data, None)

    assert Codecs(order[::-1]).open(sealed, encoding, None) == data


@pytest.mark.parametrize("encoding", ["json+zip+zip", "json+zip+b64+zip", "json+bound+bound@"])
def test_a_codec_that_is_named_twice_opens_nothing(encoding: str) -> None:
    """None is written so; 230 bytes, compressed three times, could open to 300 MB."""
    with pytest.raises(CannotDecode, match="names a codec twice"):
        Codecs([Zip(), Base64(), Bound()]).open(b"1", encoding, ONE)


def test_a_retired_codec_reads_and_does_not_write() -> None:
    data, encoding = Codecs([Base64("key-1")]).seal(b"1", None)
    rotated = Codecs([Base64("key-2")], also_read=[Base64("key-1")])

    assert rotated.open(data, encoding, None) == b"1"
    assert rotated.seal(b"1", None)[1] == "json+key-2"
    with pytest.raises(CannotDecode, match="there is no codec 'key-1'"):
        Codecs([Base64("key-2")]).open(data, encoding, None)


@pytest.mark.parametrize("encoding", ["msgpack", "", "zip", "zip+json", "json+", "JSON"])
def test_an_encoding_that_is_not_ours_is_refused(encoding: str) -> None:
    with pytest.raises(CannotDecode):
        Codecs([Zip()]).open(b"1", encoding, None)


@pytest.mark.parametrize("answer", [ValueError(SECRET), KeyError(SECRET), SECRET, None, bytearray(b"s3cr3t")])
def test_a_codec_that_fails_to_read_does_not_show_the_data(answer: Any) -> None:
    with pytest.raises(CannotDecode, match="codec 'broken'") as caught:
        Codecs([Broken(answer)]).open(SECRET.encode(), "json+broken", None)

    assert SECRET not in "".join(traceback.format_exception(caught.value, chain=True))
    assert caught.value.__context__ is None


def test_a_codec_that_is_interrupted_is_not_called_unreadable() -> None:
    with pytest.raises(KeyboardInterrupt):
        Codecs([Broken(KeyboardInterrupt())]).open(b"1", "json+broken", None)


def test_a_codec_must_write_bytes() -> None:
    with pytest.raises(InvalidInput, match="'broken' encoded to a str"):
        Codecs([Broken("x")]).seal(b"1", None)
    with pytest.raises(ConnectionError):
        Codecs([Broken(ConnectionError("the key service is away"))]).seal(b"1", None)


@pytest.mark.parametrize("name", ["", "Zip", "a+b", "a b", "json", "ü", "a\n", None, 3])
def test_a_codec_needs_a_name_that_can_be_stored(name: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        Codecs([Base64(name)])
    assert caught.value.field == "codecs"

    with pytest.raises(InvalidInput) as retired:
        Codecs(also_read=[Base64(name)])
    assert retired.value.field == "also_read"


def test_the_names_of_codecs_are_distinct_and_fit_where_they_are_stored() -> None:
    with pytest.raises(InvalidInput, match="two codecs"):
        Codecs([Zip(), Zip()])
    with pytest.raises(InvalidInput, match="two codecs"):
        Codecs([Zip()], also_read=[Zip()])
    Codecs([Base64("a" * 251)])
    with pytest.raises(InvalidInput, match="257 bytes"):
        Codecs([Base64("a" * 252)])


ONE, OTHER = UUID(int=1), UUID(int=2)


def test_a_codec_that_binds_reads_data_only_where_it_belongs() -> None:
    codecs = Codecs([Zip(), Bound()])
    assert codecs.binds and not Codecs([Zip()]).binds
    sealed, encoding = codecs.seal(b"1", ONE)
    assert encoding == "json+zip+bound@"
    assert codecs.open(sealed, encoding, ONE) == b"1"
    for moved, named in ((OTHER, encoding), (None, encoding), (ONE, "json+zip+bound")):
        with pytest.raises(CannotDecode, match="codec 'bound"):
            codecs.open(sealed, named, moved)


def test_data_of_no_execution_is_read_in_every_one() -> None:
    codecs = Codecs([Bound()])
    sealed, encoding = codecs.seal(b"1", None)
    assert encoding == "json+bound"
    assert codecs.open(sealed, encoding, ONE) == codecs.open(sealed, encoding, None) == b"1"
    with pytest.raises(CannotDecode):
        codecs.open(sealed, "json+bound@", ONE)


def test_plain_data_is_refused_if_the_app_says_so() -> None:
    strict = Codecs([Zip(), Bound("key-2")], also_read=[Bound("key-1"), Base64()], accept_plain=False)
    for data, encoding in (
        (b"1", None),
        (b"1", "json"),
        (zlib.compress(b"1"), "json+zip"),
        (zlib.compress(zlib.compress(b"1")), "json+zip+zip"),
        Codecs([Base64()]).seal(b"1", ONE),
    ):
        with pytest.raises(CannotDecode, match="not encrypted, and this app accepts nothing else"):
            strict.open(data, encoding, ONE)
    for writer in (strict, Codecs([Bound("key-1")]), Codecs([Bound("key-2")])):
        assert strict.open(*writer.seal(b"1", ONE), ONE) == b"1"


@pytest.mark.parametrize("codecs", [[], [Zip()]])
def test_plain_data_is_not_refused_without_a_codec_that_binds(codecs: list[Zip]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Codecs(codecs, accept_plain=False)
    assert caught.value.field == "accept_plain"
    with pytest.raises(InvalidInput):
        Codecs([Bound()], accept_plain=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "ValueError: x", "[sealed", "ümläut \n\n tab\t"])
def test_a_text_is_sealed_as_text(text: str) -> None:
    assert Codecs().seal_text(text, ONE) == text
    assert Codecs().open_text(text, ONE) == shown(text) == text
    sealed = Codecs([Bound()]).seal_text(text, ONE)
    assert sealed.startswith("[sealed json+bound@] ")
    assert Codecs([Bound()]).open_text(sealed, ONE) == text
    for codecs, execution_id in ((Codecs(), ONE), (Codecs([Zip()]), ONE), (Codecs([Bound()]), OTHER)):
        assert codecs.open_text(sealed, execution_id) == shown(sealed) == "[sealed]"
    assert Codecs([Bound()]).open_text("[sealed json+bound@] ***", ONE) == "[sealed]"


def test_a_context_without_an_annotation_is_refused_at_the_decoration() -> None:
    async def of_async(ctx): ...  # type: ignore[no-untyped-def]

    def of_sync(n, context): ...  # type: ignore[no-untyped-def]

    def argument(ctx=5): ...  # type: ignore[no-untyped-def]

    for fn, asked in ((of_async, "ctx: ff.Context?"), (of_sync, "context: ff.OtherContext?")):
        with pytest.raises(InvalidInput, match="did you mean") as caught:
            Signature.of(fn, context_types=CONTEXTS)
        assert asked in str(caught.value)
    assert Signature.of(argument, context_types=CONTEXTS).context_param is None
