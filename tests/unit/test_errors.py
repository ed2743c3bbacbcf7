"""The error tree and its table."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

import flowfabric
from flowfabric import errors
from flowfabric._postgres.database import translate
from flowfabric._postgres.refusals import refusal
from flowfabric._secrets import redact
from flowfabric._taxonomy import CONNECTION_KINDS, LEASE_LOST_KINDS, TAXONOMY, TaxonomyRow
from flowfabric.errors import (
    BudgetExceeded,
    Conflict,
    ConnectionFailed,
    Contention,
    Corruption,
    CursorRefused,
    ExecutionNotActive,
    FlowFabricError,
    FlowFailed,
    Interrupted,
    InvalidInput,
    LeaseLost,
    NoSignal,
    NotAllowed,
    NotFound,
    Purged,
    Reject,
    ResourceExhausted,
    RetriesExhausted,
    RetryLater,
    StateError,
    StepFailed,
    StepsChanged,
    StreamDisconnected,
    TaskFailed,
    TimedOut,
    TransportError,
    Unavailable,
    ValidationFailed,
    WorkerAtCapacity,
)
from flowfabric.values.event import EventCursor
from tests.each import each

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")

FAMILIES = {
    "not_found": NotFound,
    "validation": ValidationFailed,
    "contention": Contention,
    "conflict": Conflict,
    "state": StateError,
    "transport": TransportError,
    "unavailable": Unavailable,
    "resource": ResourceExhausted,
    "capacity": WorkerAtCapacity,
    "permission": NotAllowed,
    "timed_out": TimedOut,
    "cursor": CursorRefused,
    "subscription": StreamDisconnected,
    "task": TaskFailed,
    "step": (StepFailed, StepsChanged),
    "wait": NoSignal,
    "budget": BudgetExceeded,
}

VALIDATION = """
    InvalidInput CapabilityMismatch InvalidCapabilities InvalidPolicyJson InvalidBlockingReason
    Corruption PayloadTooLarge SignalLimitExceeded InvalidToken
    InvalidWaitpointForExecution
    InvalidDependency
    InvalidKid InvalidSecretHex InvalidGraceMs
    RetentionLimitExceeded InvalidBudgetScope
"""
# kind: (class, http, code)
CONTENTION = {
    "UseClaimResumedExecution": ("R", 409, "contention"),
    "NotAResumedExecution": ("R", 409, "contention"),
    "ExecutionNotLeaseable": ("R", 409, "contention"),
    "InvalidClaimGrant": ("R", 409, "contention"),
    "ClaimGrantExpired": ("R", 409, "contention"),
    "ExecutionNotActive": ("T", 409, "contention"),
    "ExecutionNotEligible": ("I", 409, "contention"),
    "NoActiveLease": ("I", 409, "contention"),
    "RateLimitExceeded": ("R", 429, "rate_limit_exceeded"),
    "WaitpointNotFound": ("R", 409, "contention"),
    "StaleGraphRevision": ("R", 409, "contention"),
    "RetryExhausted": ("R", 500, "retry_exhausted"),
}
CONFLICT = """
    DependencyAlreadyExists CycleDetected SelfReferencingEdge ExecutionAlreadyInFlow WaitpointAlreadyExists
    RotationConflict
"""
STATE = {
    "StaleLease": ("T", "state_conflict"),
    "LeaseExpired": ("T", "already_satisfied"),
    "LeaseRevoked": ("T", "already_satisfied"),
    "ExecutionNotTerminal": ("T", "execution_not_terminal"),
    "MaxReplaysExhausted": ("T", "max_replays_exhausted"),
    "NotRunnable": ("T", "not_runnable"),
    "Terminal": ("T", "terminal"),
    "FlowAlreadyTerminal": ("T", "flow_already_terminal"),
    "LaneClosed": ("T", "lane_closed"),
    "GrantAlreadyExists": ("I", "state_conflict"),
    **dict.fromkeys(
        [
            "AlreadySatisfied",
        ],
        ("I", "already_satisfied"),
    ),
    **dict.fromkeys(
        [
            "ExecutionNotSuspended",
            "AlreadySuspended",
            "WaitpointClosed",
            "WaitpointNotPending",
            "PendingWaitpointExpired",
            "NotBlockedByDeps",
            "DepsNotSatisfied",
        ],
        ("I", "state_conflict"),
    ),
    **dict.fromkeys(
        [
            "TargetNotSignalable",
            "ExecutionNotInFlow",
            "StreamClosed",
            "StaleOwnerCannotAppend",
        ],
        ("T", "state_conflict"),
    ),
}
CLASSES = {"T": "terminal", "R": "retryable", "I": "informational"}


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def expected() -> Iterator[tuple[str, str, str, int, str]]:
    for name in VALIDATION.split():
        code = "validation_error" if name == "Corruption" else snake(name)
        yield "validation", snake(name), "terminal", 400, code
    for name, (letter, http, code) in CONTENTION.items():
        yield "contention", snake(name), CLASSES[letter], http, code
    for name in CONFLICT.split():
        yield "conflict", snake(name), "terminal", 409, snake(name)
    for name, (letter, code) in STATE.items():
        yield "state", snake(name), CLASSES[letter], 409, code
    # Not of the chapters: an answer that does not fit what its task waits for.
    yield "validation", "payload_refused", "terminal", 422, "payload_refused"
    # Nor these: members are forgotten with their flow, and a flow when all of them have ended.
    yield "state", "execution_in_flow", "terminal", 409, "state_conflict"
    yield "state", "flow_not_terminal", "terminal", 409, "state_conflict"
    # Nor this: a parent still needs the result.
    yield "state", "execution_needed", "terminal", 409, "state_conflict"
    yield "state", "flow_needed", "terminal", 409, "state_conflict"
    # Nor this: what submitters may ask to be told.
    yield "conflict", "duplicate_submission", "terminal", 409, "duplicate_submission"
    yield "conflict", "instance_in_use", "terminal", 409, "instance_in_use"
    # Nor these, of API keys and of repeated requests.
    yield "conflict", "api_key_exists", "terminal", 409, "api_key_exists"
    yield "state", "api_key_revoked", "terminal", 409, "api_key_revoked"
    yield "conflict", "request_in_progress", "retryable", 409, "request_in_progress"
    yield "state", "execution_redacted", "terminal", 409, "execution_redacted"
    # Nor this: the verdict of a call that does not wait for locks.
    yield "contention", "execution_locked", "retryable", 409, "contention"
    # Nor this: a budget or quota that was changed after it was read.
    yield "contention", "stale_definition", "retryable", 409, "contention"


def build(row: TaxonomyRow) -> FlowFabricError:
    match row.family:
        case "not_found":
            return NotFound("execution", ID)
        case "unavailable":
            return Unavailable("list_workers")
        case "capacity":
            return WorkerAtCapacity(100)
        case "resource":
            return ResourceExhausted("stream_ops", 64, 1600)
        case "permission":
            return NotAllowed("cancel_as_operator", ["operate"], option="--operate-role")
        case "timed_out":
            return TimedOut("shutdown_prepare", 15_000)
        case "cursor":
            return CursorRefused(row.kind, "why", position=7)
        case "subscription":
            return StreamDisconnected("why", cursor=EventCursor(7))
        case "task" if row.kind == "purged":
            return Purged(ID)
        case "task":
            return TaskFailed(
                row.kind, "boom", execution_id=ID, category="c", error_type="ValueError", traceback="File ..."
            )
        case "step":
            return StepFailed("s", "E", "boom") if row.kind == "step_failed" else StepsChanged("'s' is gone")
        case "wait":
            return NoSignal(row.kind, "approval", execution_id=ID)
        case "budget":
            return BudgetExceeded("team", "tokens", used=5, held=1, limit=10, asked=6, execution_id=ID)
        case "transport" if row.kind in CONNECTION_KINDS:
            return ConnectionFailed(row.kind, "why", target="postgresql://ann:hunter2@db:5432/app")
        case "transport":
            return TransportError(row.kind, "why")
        case _:
            return refusal(row.kind, "why", execution_id=ID)


@each(("family", "kind", "error_class", "http", "code"), list(expected()))
def test_every_kind_of_the_chapter_is_in_the_table(
    family: str, kind: str, error_class: str, http: int, code: str
) -> None:
    (row,) = [row for row in TAXONOMY if (row.family, row.kind) == (family, kind)]
    assert (row.error_class, row.http_status, row.code) == (error_class, http, code)


def test_the_refusal_families_hold_no_kind_the_chapter_does_not_name() -> None:
    named = {(family, kind) for family, kind, *_ in expected()}
    families = {family for family, _ in named}
    assert {(row.family, row.kind) for row in TAXONOMY if row.family in families} == named


def test_no_kind_is_in_the_table_that_nothing_raises() -> None:
    source = Path(flowfabric.__file__).parent
    texts = [
        file.read_text() for file in source.rglob("*") if file.suffix in (".py", ".sql") and file.name != "_taxonomy.py"
    ]
    code = "\n".join(texts)
    assert [row.kind for row in TAXONOMY if not re.search(rf"""['"]{row.kind}['"]""", code)] == []


def test_a_family_and_kind_appear_once() -> None:
    assert len({(row.family, row.kind) for row in TAXONOMY}) == len(TAXONOMY)


@each("row", TAXONOMY)
def test_an_error_carries_what_its_row_says(row: TaxonomyRow) -> None:
    error = build(row)
    assert isinstance(error, FAMILIES[row.family])
    assert (error.family, error.kind, error.code) == (row.family, row.kind, row.code)
    assert (error.error_class, error.http_status) == (row.error_class, row.http_status)
    assert error.retryable is (row.error_class == "retryable")
    assert error.wire_retryable is row.wire_retryable
    assert str(error)


@each("row", TAXONOMY)
@each("how", ["pickle", "copy", "deepcopy"])
def test_an_error_survives_pickling_and_copying(row: TaxonomyRow, how: str) -> None:
    error = build(row)
    error.add_note("while testing")
    again = {
        "pickle": lambda e: pickle.loads(pickle.dumps(e)),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
    }[how](error)
    assert type(again) is type(error)
    assert again.args == error.args
    assert again.__dict__ == error.__dict__
    assert str(again) == str(error)
    assert repr(again) == repr(error)


@each("row", TAXONOMY)
def test_the_wire_flag_is_true_for_retryables_and_for_contention_but_one(row: TaxonomyRow) -> None:
    if row.family == "contention":
        assert row.wire_retryable is (row.kind != "retry_exhausted")
    else:
        assert row.wire_retryable is (row.error_class == "retryable")


def test_every_exception_of_the_module_hangs_on_the_one_root_and_in_the_drawing() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    ]
    beside = {RetryLater, Reject}
    assert len(classes) == 28 + len(beside)
    for cls in classes:
        assert issubclass(cls, FlowFabricError) != (cls in beside)
        assert re.search(rf"\b{cls.__name__}\b", errors.__doc__ or "")


def test_a_handlers_except_exception_does_not_catch_interrupted() -> None:
    assert not issubclass(Interrupted, Exception)
    assert "Interrupted" in (errors.__doc__ or "")


def test_a_failed_task_says_which_how_and_why() -> None:
    error = TaskFailed("failed", "no such user", execution_id=ID, error_type="app.Missing", traceback="File ...")
    assert str(error) == f"execution {ID} failed: app.Missing: no such user"
    assert (error.message, error.traceback, error.category) == ("no such user", "File ...", None)
    assert str(TaskFailed("cancelled", execution_id=ID)) == f"execution {ID} cancelled"
    assert str(TaskFailed("expired", "attempt_timeout")) == "expired: attempt_timeout"


def test_a_purged_result_is_told_apart_from_a_failed_one() -> None:
    error = Purged(ID)
    assert isinstance(error, TaskFailed)
    assert (error.kind, error.execution_id, error.http_status) == ("purged", ID, 410)
    assert f"{ID} was purged" in str(error)


def test_a_failed_flow_names_its_nodes_and_keeps_what_succeeded() -> None:
    flow = "0b0e8400-e29b-41d4-a716-446655440000"
    boom = TaskFailed("failed", "boom\nand more", execution_id=ID, error_type="ValueError")
    error = FlowFailed("failed", flow, failures={"b": boom}, skipped=["c", "d"], results={"a": 1})
    assert str(error) == f"flow {flow} failed: b failed: ValueError: boom; 2 skipped"
    assert (error.failures, error.skipped, error.results) == ({"b": boom}, ("c", "d"), {"a": 1})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.results) == (FlowFailed, str(error), {"a": 1})
    assert str(again.failures["b"]) == str(boom)
    many = FlowFailed("failed", flow, failures={f"n{number}": boom for number in range(7)})
    assert str(many).endswith("n4 failed: ValueError: boom; and 2 more")
    assert str(FlowFailed("cancelled", flow, failures={}, reason="no")) == f"flow {flow} cancelled: no"
    assert str(FlowFailed("cancelled", flow, failures={})) == f"flow {flow} cancelled"


def test_a_step_that_failed_before_names_itself_and_its_error() -> None:
    error = StepFailed("charge", "stripe.CardError", "declined")
    assert (error.step, error.error_type, error.message) == ("charge", "stripe.CardError", "declined")
    assert "charge" in str(error) and "declined" in str(error)


@each("kind", sorted(LEASE_LOST_KINDS))
def test_a_lost_lease_is_always_raised_as_lease_lost(kind: str) -> None:
    with pytest.raises(ValueError, match="LeaseLost"):
        StateError(kind)
    error = refusal(kind, execution_id=ID)
    assert isinstance(error, LeaseLost)
    assert error.execution_id == ID
    assert str(ID) in str(error)


@each(
    ("family", "kind"),
    [
        (ValidationFailed, "invalid_input"),
        (ValidationFailed, "corruption"),
        (Contention, "execution_not_active"),
        (Contention, "retry_exhausted"),
        (TransportError, "schema_older"),
    ],
)
def test_a_kind_with_its_own_class_is_refused_by_the_family(family: type[FlowFabricError], kind: str) -> None:
    with pytest.raises(ValueError, match="raised as"):
        family(kind)


def test_an_unknown_kind_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="no kind"):
        StateError("on_fire")
    with pytest.raises(ValueError, match="no kind"):
        LeaseLost("terminal")
    with pytest.raises(ValueError, match="no kind"):
        FlowFabricError("terminal")
    with pytest.raises(ValueError, match="no refusal"):
        refusal("on_fire")


def test_invalid_input_names_the_field_the_problem_and_what_is_allowed() -> None:
    error = InvalidInput("is 70 bytes long", field="lane_id", allowed="at most 64 bytes")
    assert (error.field, error.problem, error.allowed) == ("lane_id", "is 70 bytes long", "at most 64 bytes")
    assert str(error) == "invalid_input: lane_id: is 70 bytes long; allowed: at most 64 bytes"


def test_invalid_input_without_a_field_is_its_problem_alone() -> None:
    error = InvalidInput("fence_required")
    assert error.field is None
    assert error.detail == "fence_required"


def test_not_active_always_fills_its_four_texts() -> None:
    error = ExecutionNotActive()
    facts = (error.terminal_outcome, error.lease_epoch, error.lifecycle_phase, error.attempt_id)
    assert facts == ("none", "", "", "")
    error = ExecutionNotActive(terminal_outcome="success", lease_epoch=4, lifecycle_phase="terminal", attempt_id="a1")
    facts = (error.terminal_outcome, error.lease_epoch, error.lifecycle_phase, error.attempt_id)
    assert facts == ("success", "4", "terminal", "a1")
    assert "terminal_outcome=success" in str(error)


def test_not_found_says_what_and_which() -> None:
    error = NotFound("flow", "f1")
    assert (error.entity, error.id, error.execution_id) == ("flow", "f1", None)
    assert str(error) == "not found: flow f1"
    assert str(NotFound("budget")) == "not found: budget"
    assert NotFound("execution", ID).execution_id == ID


def test_a_refusal_takes_the_facts_of_its_class() -> None:
    missing = refusal("not_found", entity="flow", id="f1")
    assert isinstance(missing, NotFound)
    assert missing.entity == "flow"
    wrong = refusal("invalid_input", "too long", field="lane_id")
    assert isinstance(wrong, InvalidInput)
    assert wrong.field == "lane_id"
    clash = refusal("dependency_already_exists", existing="edge-1")
    assert isinstance(clash, Conflict)
    assert clash.existing == "edge-1"
    assert isinstance(refusal("corruption", "bad"), Corruption)
    assert isinstance(refusal("retry_exhausted"), RetriesExhausted)


@each(
    ("kind", "words"),
    [
        ("unreachable", "cannot be reached"),
        ("wrong_password", "refused the user name or password"),
        ("missing_privileges", "lacks privileges"),
        ("database_missing", "does not exist"),
        ("server_too_old", "too old"),
        ("server_unfit", "lacks a part of PostgreSQL"),
        ("bad_address", "the address of the database is wrong"),
        ("schema_missing", "run `flowfabric migrate`"),
        ("schema_older", "run `flowfabric migrate`"),
        ("schema_newer", "upgrade the package"),
        ("schema_foreign", "`flowfabric db reset`"),
    ],
)
def test_a_failed_connection_says_what_to_do(kind: str, words: str) -> None:
    error = ConnectionFailed(kind, "server said no", target="postgresql://ann:hunter2@db/app")
    assert words in str(error)
    assert "server said no" in str(error)
    assert error.target == "postgresql://ann:***@db/app"
    assert "hunter2" not in repr(error) + str(error) + repr(error.__dict__)


@each(
    ("text", "masked"),
    [
        ("postgresql://ann:hunter2@db:5432/app", "postgresql://ann:***@db:5432/app"),
        ("postgres://ann:p%40ss:w@db/app?x=1", "postgres://ann:***@db/app?x=1"),
        ("postgresql://:hunter2@/app", "postgresql://:***@/app"),
        ("host=db password=hunter2 user=ann", "host=db password=*** user=ann"),
        ("host=db password='two words' user=ann", "host=db password=*** user=ann"),
        ("postgresql://db/app?password=hunter2&x=1", "postgresql://db/app?password=***&x=1"),
        ("postgresql://ann:1/hunter2@db/app", "postgresql://ann:***@db/app"),
        ("postgresql://ann:a#b?c@hunter2@db/app", "postgresql://ann:***@db/app"),
        ("host=db sslpassword = hunter2", "host=db sslpassword = ***"),
        ("postgresql://ann@db/app", "postgresql://ann@db/app"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_passwords_are_masked(text: str, masked: str) -> None:
    assert redact(text) == masked
    assert "hunter2" not in repr(TransportError("other", text))


def test_for_a_transaction_that_needs_more_locks_than_there_are_the_error_names_the_setting() -> None:
    full = asyncpg.OutOfMemoryError("out of shared memory")
    full.hint = 'You might need to increase "max_locks_per_transaction".'
    told = translate(full, "here")
    assert told.kind == "server_busy"
    assert "raise max_locks_per_transaction" in str(told)
