"""Bad arguments of the operations about API keys, the audit log, kept answers, bulk jobs and failures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from flowfabric.engine.acting import Actor
from flowfabric.values.bulk import ExecutionFilter
from flowfabric.values.kept_answer import AnswerKey
from flowfabric.values.operator_audit import AuditFilter
from tests.sql.bad_input.table import (
    BYTES,
    DURATIONS,
    IDS,
    INTS,
    KEYS,
    LANES,
    LISTS,
    MOMENTS,
    TEXTS,
    UNKNOWN,
    UUID_TEXT,
    UUIDS,
    Case,
    World,
    by_field,
)

KEY_IDS: list[Any] = [None, 5, b"x", "", "x", "0" * 11, "0" * 13, "00000000000G", "000000000000\n", "\0", "\ud800"]
NAMESPACES: list[Any] = ["abc", 5, b"abc", {"a": 1}, [], [5], ["\0"], ["x" * 257], ["n"] * 101]
STATES: list[Any] = [*LISTS, [5], ["completed"], ["nonsense"], [None]]
ANSWERS: list[Any] = [
    None, 5, "k", ("", "o", "k"),
    *(AnswerKey(key_id=value, operation="o", idempotency_key="k", holder=UUID(UUID_TEXT)) for value in TEXTS),
    *(AnswerKey(key_id="", operation="o", idempotency_key=value, holder=UUID(UUID_TEXT)) for value in KEYS),
    AnswerKey(key_id="", operation="o", idempotency_key="k", holder="x"),  # type: ignore[arg-type]
]  # fmt: skip
# The fields of a filter, and what is wrong with each.
WRONG: dict[str, list[Any]] = {
    "namespace": TEXTS,
    "lane_ids": [*LISTS, *([lane] for lane in LANES)],
    "kinds": [*LISTS, *([kind] for kind in TEXTS)],
    "states": [*LISTS, [5], ["nonsense"], ["completed"]],
    "tag": [5, "ab", ("a",), ("a", 5), ("\0", "b")],
    "flow_id": UUIDS,
    "parent_id": [one for one in IDS if one is not None],
    "created_from": [*MOMENTS, timedelta(1)],
    "created_before": [*MOMENTS, timedelta(1)],
}
FILTERS: list[Any] = [None, 5, {}, {"kinds": ["k"]}, ExecutionFilter()]
FILTERS += [ExecutionFilter(**{name: value}) for name, values in WRONG.items() for value in values]


AUDIT_FILTERS: list[Any] = [
    None, 5, {}, AuditFilter(actor=5), AuditFilter(operation="\0"), AuditFilter(target="x" * 1025),  # type: ignore[arg-type]
    AuditFilter(since=5), AuditFilter(until="2030-01-01"),  # type: ignore[arg-type]
]  # fmt: skip


def bulk(world: World) -> dict[str, Any]:
    return {"operation": "cancel", "filter": ExecutionFilter(kinds=("nothing of it",))}


CASES = [
    Case(
        "create_api_key",
        lambda world: {"name": "good", "scopes": ["read"]},
        name=by_field([None, "", *TEXTS, "a\nb", "\x7f"]),
        scopes=by_field([None, [], "read", 5, ["nonsense"], [5], [None], {"read": 1}]),
        namespaces=by_field(NAMESPACES),
        hides_payloads=by_field([None, 5, "yes"]),
        expires=by_field([*DURATIONS, *MOMENTS]),
    ),
    Case(
        "list_api_keys",
        lambda world: {},
        cursor=by_field([5, "x", (), (5, "x"), ("x", "y"), (1, 2, 3)]),
        limit=by_field(INTS),
    ),
    *(
        Case(name, lambda world: {"key_id": world.key_id}, key_id=by_field(KEY_IDS))
        for name in ("read_api_key", "note_api_key_use")
    ),
    Case("revoke_api_key", lambda world: {"key_id": world.key_id}, key_id=by_field(KEY_IDS)),
    Case(
        "rotate_api_key",
        lambda world: {"key_id": world.key_id},
        key_id=by_field(KEY_IDS),
        grace=by_field([None, 5, timedelta(-1), timedelta.max]),
    ),
    Case("verify_api_key", lambda world: {"key": "ffk_x"}),
    Case(
        "write_operator_audit",
        lambda world: {"actor": Actor(name="a", operation="o")},
        actor=by_field([None, 5, "a"]),
        outcome=by_field([None, *TEXTS]),
    ),
    Case(
        "list_operator_audit",
        lambda world: {},
        filter=by_field(AUDIT_FILTERS),
        before=by_field(["5", 1.0, True, -1, 2**63]),
        limit=by_field(INTS),
    ),
    Case(
        "begin_answer",
        lambda world: {"key": world.answer, "request": b"r"},
        key=by_field(ANSWERS),
        request=by_field(BYTES),
        held_for=by_field([None, *DURATIONS]),
        kept_for=by_field([None, *DURATIONS]),
    ),
    Case(
        "finish_answer",
        lambda world: {"key": world.answer, "status": 200},
        key=by_field(ANSWERS),
        status=by_field([5, "200", 1.0, True, 600]),
        body=by_field(BYTES),
    ),
    Case("forget_answer", lambda world: {"key": world.answer}, key=by_field(ANSWERS)),
    Case(
        "in_namespaces",
        lambda world: {"namespaces": ["n"], "execution_ids": [], "flow_ids": []},
        namespaces=by_field(NAMESPACES),
        execution_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
        flow_ids=by_field([None, 5, "x", [UNKNOWN] * 1001]),
    ),
    Case(
        "in_namespaces",
        lambda world: {"namespaces": ["n"]},
        execution_ids=by_field([[value] for value in IDS], "execution_id"),
        flow_ids=by_field([[value] for value in (None, *UUIDS)], "flow_id"),
    ),
    Case("preview_bulk", bulk, operation=by_field([None, 5, "", "delete", []]), filter=by_field(FILTERS)),
    Case(
        "create_bulk",
        lambda world: {**bulk(world), "actor": "a"},
        operation=by_field([None, 5, "", "delete", []]),
        filter=by_field(FILTERS),
        actor=by_field([None, *TEXTS]),
        key_id=by_field(KEY_IDS[1:]),
        bulk_id=by_field(UUIDS),
    ),
    Case(
        "read_bulk",
        lambda world: {"bulk_id": world.bulk},
        bulk_id=by_field([None, *UUIDS]),
        namespaces=by_field(NAMESPACES),
    ),
    Case("list_running_bulk", lambda world: {}, limit=by_field([*INTS, 0, 1001])),
    Case(
        "run_bulk",
        lambda world: {"bulk_id": world.bulk},
        bulk_id=by_field([None, *UUIDS]),
        limit=by_field([*INTS, 0, 1001]),
    ),
    Case(
        "stop_bulk",
        lambda world: {"bulk_id": world.bulk},
        bulk_id=by_field([None, *UUIDS]),
        namespaces=by_field(NAMESPACES),
    ),
    Case(
        "list_failures",
        lambda world: {},
        namespaces=by_field(NAMESPACES),
        lane_ids=by_field([*LISTS, *([lane] for lane in LANES)]),
        kinds=by_field([*LISTS, *([kind] for kind in TEXTS)]),
        states=by_field([None, *STATES]),
        tag=by_field([5, "ab", ("a",), ("a", 5), ("\0", "b")]),
        created_from=by_field([*MOMENTS, timedelta(1)]),
        created_before=by_field([*MOMENTS, timedelta(1)]),
        most=by_field([*INTS, 0, 50_001]),
        limit=by_field([*INTS, 0, 1001]),
    ),
]
