"""The records of earlier runs that a run of a handler reads, and how exceptions are stored."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.engine.checks import ESCAPED_NUL
from flowfabric.errors import InvalidInput, StepFailed, TimedOut
from flowfabric.values.ids import ExecutionId
from flowfabric.values.step import Step, StepKind
from flowfabric.worker.durable.memory import Memory, check_name, encode_error, remembered_error

ID = ExecutionId(UUID("0b0e8400-e29b-41d4-a716-446655440000"))


def step(name: str, n: int = 0, kind: StepKind = "step", run: int = 0, error: Any = None) -> Step:
    return Step(
        execution_id=ID, generation=0, name=name, n=n, kind=kind, run=run, attempt_index=0, result=None, encoding=None,
        error=error, at=None, child_id=None, seconds=None, recorded_at=datetime.now(UTC),
    )  # fmt: skip


def test_uses_of_a_name_are_counted_and_each_returns_its_record() -> None:
    known = [step("a", 0), step("a", 2), step("b", 0)]
    memory = Memory(known)
    assert [memory.next(name, "step")[2:] for name in ("a", "b", "a", "a", "a", "c")] == [
        (0, known[0]), (0, known[2]), (1, None), (2, known[1]), (3, None), (0, None),
    ]  # fmt: skip


def test_each_kind_counts_for_itself() -> None:
    known = [step("now", kind="now"), step("now", kind="step"), step("sleep", kind="sleep")]
    memory = Memory(known)
    assert memory.next("now", "step") == ("step", "now", 0, known[1])
    assert memory.next("now", "now") == ("now", "now", 0, known[0])
    assert memory.next("sleep", "step") == ("step", "sleep", 0, None)
    assert memory.next("sleep", "sleep") == ("sleep", "sleep", 0, known[2])


def test_an_old_name_finds_the_record_of_the_step() -> None:
    known = [step("mail"), step("mail", 1), step("send mail", 1)]
    memory = Memory(known)
    found = [memory.next("send mail", "step", "mail") for _ in range(2)]
    assert [(one.name, one.use, one.known) for one in found] == [("mail", 0, known[0]), ("mail", 1, known[1])]
    assert list(memory.missing) == [("step", "send mail", 1)]
    assert memory.next("send mail", "step", "mail")[1:] == ("send mail", 0, None)
    assert memory.next("send mail", "step", "mail").known is known[2]


@pytest.mark.parametrize(("run", "known"), [(0, True), (1, False), (2, False)])
def test_a_failure_is_known_within_its_run_alone(run: int, known: bool) -> None:
    memory = Memory([step("a", run=0, error={"message": "boom"})], run)
    assert (memory.next("a", "step").known is not None) is known


def test_a_success_is_known_to_every_later_run() -> None:
    assert Memory([step("a", run=0)], 7).next("a", "step").known is not None


def test_recorded_things_that_are_not_asked_for_are_missing() -> None:
    memory = Memory([step("a"), step("b"), step("b", 1), step("c", kind="submit"), step("d", kind="wait")])
    a, b, b1, c, d = ("step", "a", 0), ("step", "b", 0), ("step", "b", 1), ("submit", "c", 0), ("wait", "d", 0)
    assert list(memory.missing) == [a, b, b1, c, d]
    memory.next("b", "step")
    assert list(memory.missing) == [a, b1, c, d]
    memory.next("c", "step")
    assert c in memory.missing, "a child is no step"
    for name, kind in (("a", "step"), ("b", "step"), ("c", "submit"), ("d", "wait"), ("e", "step")):
        memory.next(name, kind)  # type: ignore[arg-type]
    assert not memory.missing


@pytest.mark.parametrize("kind", ["now", "sleep", "result", "patch"])
def test_an_unused_time_result_or_patch_does_no_harm(kind: StepKind) -> None:
    assert not Memory([step("a", kind=kind)]).missing


def test_a_wait_that_was_given_up_and_lenient_steps_are_never_missing() -> None:
    given_up = msgspec.structs.replace(step("a", kind="wait"), outcome="given_up")
    assert not Memory([given_up]).missing
    assert not Memory([step("a")], strict=False).missing


def test_a_failure_in_an_earlier_run_explains_another_branch_if_something_followed() -> None:
    boom = {"message": "boom"}
    assert not Memory([step("a", error=boom), step("rescue")], run=1).missing
    assert list(Memory([step("a", error=boom), step("rescue")], run=0).missing) == [
        ("step", "a", 0),
        ("step", "rescue", 0),
    ]
    assert list(Memory([step("first"), step("a", error=boom)], run=1).missing) == [("step", "first", 0)]
    # A success replaced the failure; what followed the failure is marked by the database.
    again = msgspec.structs.replace(step("a", run=1), outcome="retried")
    assert not Memory([step("rescue"), again], run=1).missing


@pytest.mark.parametrize("name", ["", "\0", "a\0", "\ud800", "x" * 257, 5, None, b"x", ["x"]])
def test_a_name_that_cannot_be_one_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_name(name)
    assert caught.value.field == "name"


@pytest.mark.parametrize("name", ["x", " ", "x" * 256, "émile", "a/b:c {0}\n", "sleep", "submit x"])
def test_any_other_text_is_a_name(name: str) -> None:
    assert check_name(name) == name


# ---- exceptions


class Plain(Exception):
    pass


class Coded(Exception):
    def __init__(self, code: int, *, hint: str | None = None) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint
        self.connection = object()


class Demanding(Exception):
    def __init__(self, one: object, two: object) -> None:
        super().__init__(one, two)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Leaning(Exception):
    """Its words need what was not kept."""

    def __init__(self, response: object) -> None:
        super().__init__("leaning")
        self.response = response

    def __str__(self) -> str:
        return str(self.response.status)  # type: ignore[attr-defined]


class Outer:
    class Inner(Exception):
        pass


def again(error: BaseException, *, sealed: bool = False) -> Exception:
    """What a later run gets."""
    text, details = encode_error(error, sealed=sealed)
    stored = json.loads(text)
    assert not ESCAPED_NUL.search(text), "the database could not hold it"
    return remembered_error(step("charge", error=stored), details)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"), ValueError(), ValueError("a", 1, None, [1, {"b": 2.5}]), KeyError("k"), Plain("boom"),
        FileNotFoundError(2, "No such file"), Demanding(1, 2), Outer.Inner("x"), ValueError("a\0b"), TimeoutError(),
        StopIteration(5), UnicodeError("x"), ArithmeticError(2**70),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("sealed", [False, True])
def test_an_exception_comes_back_as_it_was(error: Exception, sealed: bool) -> None:
    found = again(error, sealed=sealed)
    assert type(found) is type(error)
    assert found.args == error.args
    assert str(found) == str(error)


def test_plain_attributes_come_back_too() -> None:
    found = again(Coded(402, hint="try another card"))
    assert isinstance(found, Coded)
    assert (found.code, found.hint, str(found)) == (402, "try another card", "code 402")
    assert not hasattr(found, "connection")
    noted = ValueError("x")
    noted.add_note("while charging")
    assert again(noted).__notes__ == ["while charging"]


@pytest.mark.parametrize(
    "error",
    [Demanding(object(), 2), ValueError(b"bytes"), ValueError((1, 2)), ValueError(float("nan")), ValueError("\ud800")],
    ids=["object", "bytes", "tuple", "nan", "surrogate"],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_arguments_that_cannot_be_kept_leave_class_and_words(error: Exception, sealed: bool) -> None:
    found = again(error, sealed=sealed)
    assert type(found) is type(error)
    assert len(found.args) == 1
    assert isinstance(found.args[0], str) and found.args[0] != "[sealed]"


@pytest.mark.parametrize(
    "error", [ExceptionGroup("g", [ValueError()]), Leaning(type("R", (), {"status": 5})())], ids=repr
)
@pytest.mark.parametrize("sealed", [False, True])
def test_an_exception_that_cannot_be_recreated_is_described(error: Exception, sealed: bool) -> None:
    found = again(error, sealed=sealed)
    assert "[sealed]" not in str(found)
    assert isinstance(found, StepFailed)
    assert (found.step, found.error_type) == (
        "charge",
        f"{'' if isinstance(error, ExceptionGroup) else __name__ + '.'}{type(error).__qualname__}",
    )


def test_an_exception_of_an_unknown_class_is_described() -> None:
    local = type("Local", (Exception,), {"__module__": "not.loaded"})
    found = again(local("boom"))
    assert isinstance(found, StepFailed)
    assert (found.error_type, found.message) == ("not.loaded.Local", "boom")


@pytest.mark.parametrize("name", ["sys", "os.path", "Memory", "", "__class__"])
def test_a_class_that_is_no_exception_is_never_instantiated(name: str) -> None:
    stored = {"type": "x", "module": "flowfabric.worker.durable.memory", "name": name, "message": "m"}
    assert isinstance(remembered_error(step("s", error=stored), b'{"args": ["rm"]}'), StepFailed)


def test_an_exception_without_words_is_kept_all_the_same() -> None:
    text, _ = encode_error(Wordless(), sealed=False)
    assert json.loads(text)["type"].endswith("Wordless")


def test_our_own_errors_come_back_whole() -> None:
    found = again(TimedOut("result", 5000))
    assert isinstance(found, TimedOut)
    assert (found.op, found.elapsed_ms, found.kind, str(found)) == (
        "result", 5000, "timed_out", str(TimedOut("result", 5000)),
    )  # fmt: skip


def test_details_that_cannot_be_read_cost_the_arguments_alone() -> None:
    text, _ = encode_error(ValueError("boom", 5), sealed=False)
    found = remembered_error(step("s", error=json.loads(text)), None)
    assert type(found) is ValueError
    assert found.args == ("('boom', 5)",)
    assert remembered_error(step("s", error=json.loads(text)), b"not json").args == found.args


def test_with_codecs_the_words_are_kept_where_they_are_sealed() -> None:
    text, details = encode_error(ValueError("card 4111"), sealed=True)
    assert "4111" not in text
    assert json.loads(text)["message"] == "[sealed]"
    assert b"4111" in (details or b"")


def test_very_long_words_are_cut() -> None:
    text, details = encode_error(ValueError("x" * 1_000_000), sealed=False)
    assert len(text) < 8192
    assert details is None


@given(
    st.lists(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.text()))
)
def test_any_exception_can_be_kept_and_given_back(args: list[Any]) -> None:
    found = again(ValueError(*args))
    assert type(found) is ValueError
