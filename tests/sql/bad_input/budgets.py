"""Bad arguments of the operations about budgets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flowfabric.values.binding import Bind
from flowfabric.values.budget import CancelReservation, Report, Reserve, Settle, Usage
from tests.sql.bad_input.table import (
    AUTHORITIES,
    CURSORS,
    IDS,
    INTS,
    KEYS,
    LISTS,
    MOMENTS,
    TEXTS,
    UNKNOWN,
    UUID_TEXT,
    UUIDS,
    Case,
    by_field,
    by_kind,
)

AMOUNTS: list[Any] = [None, "5", 1.0, True, -1, 2**63, 2**64, float("nan")]
DIMENSIONS: list[Any] = ["", None, 5, b"t", "\0", "a\nb", "\x7f", "\x85", "\ud800", "x" * 257, "é" * 129]
MAPS: list[Any] = [
    5, "t", [("t", 1)], *({"t": amount} for amount in AMOUNTS), *({name: 1} for name in DIMENSIONS if name is not None),
    {None: 1}, {f"d{n}": 1 for n in range(65)},
]  # fmt: skip
BUDGETS: list[Any] = [5, [5], ["x"], [None], {"a": 1}, [], [UUID_TEXT] * 65, "nonsense", b"x"]
PLACES: list[Any] = [5, "ab", ("a",), ("", 0), ("a", -1), ("a", 2**31), ("a", True), ("a", None), ("\0", 0),
                     ("x" * 513, 0), (None, 0), ("a", 0, 0)]  # fmt: skip
USAGES: list[Any] = [
    None, 5, "t", *(Usage(custom=one) for one in MAPS), *(Usage(input_tokens=one) for one in AMOUNTS),
    *(Usage(output_tokens=one) for one in AMOUNTS), *(Usage(wall_ms=one) for one in AMOUNTS if one is not None),
    Usage(input_tokens=1, custom={"input_tokens": 1}), Usage(wall_ms=1, custom={"wall_ms": 0}), Usage(dedup_key=5),  # type: ignore[arg-type]
]  # fmt: skip
REPORTS: list[Any] = [*USAGES, *(Usage(dedup_key=key) for key in KEYS)]
HELD: list[Any] = [*USAGES, Usage(dedup_key="k")]
INTERVALS: list[Any] = [5, "5", None, timedelta(-1), timedelta(days=36_501), timedelta.max]
MODES: list[Any] = [None, 5, "Strict", "soft", "none", "\0", ["strict"]]
ACTIONS: list[Any] = [None, 5, "suspend", "reroute_fallback", "close_scope", "\0", "a\nb", "\ud800", "x" * 257]
LABELS: list[Any] = [None, *TEXTS]
BUDGET_IDS: list[Any] = [None, *UUIDS]
BOOLS: list[Any] = [None, "no", "", 0, 1, [True]]


def _definition(world: Any) -> dict[str, Any]:
    return {"name": "new", "dimensions": ["a", "b"], "hard_limits": [1, 2], "soft_limits": [0, 1]}


CASES = [
    Case(
        "create_budget",
        _definition,
        budget_id=by_field(UUIDS),
        name=by_field([*DIMENSIONS, UUID_TEXT]),
        scope_type=by_field(LABELS),
        scope_id=by_field(LABELS),
        enforcement_mode=by_field(MODES),
        on_hard_limit=by_field(ACTIONS),
        on_soft_limit=by_field(ACTIONS),
        reset_interval=by_field(INTERVALS),
        dimensions=by_field([*LISTS, [], ["a"], ["a", "a"], ["a", "b", "c"], *(["a", one] for one in DIMENSIONS)]),
        hard_limits=by_field([*LISTS, [], [1], [1, 2, 3], *([1, one] for one in AMOUNTS)], "*"),
        soft_limits=by_field([*LISTS, [], [1], [1, 2, 3], *([1, one] for one in AMOUNTS)], "*"),
        owner_id=by_field(IDS[1:]),
    ),
    Case("create_budget", _definition, scope_type=by_kind("invalid_budget_scope", ["a\nb", "\x7f"])),
    Case(
        "update_budget",
        lambda world: {"budget_id": world.budget, "hard": {"t": 5}},
        budget_id=by_field(BUDGET_IDS),
        hard=by_field(MAPS),
        soft=by_field(MAPS),
        raise_by=by_field(
            [
                5,
                "t",
                {"t": None},
                {"t": 1.0},
                {"t": True},
                {"t": 2**63},
                {"t": -(2**63)},
                {"t": -1000},
                {"none": 1},
                {"t": 2**63 - 1},
            ]
        ),
        enforcement_mode=by_field(MODES[1:]),
        on_hard_limit=by_field(ACTIONS[1:]),
        on_soft_limit=by_field(ACTIONS[1:]),
        reset_interval=by_field([one for one in INTERVALS if one is not None]),
        defined_at=by_field([*MOMENTS, timedelta(1)]),
    ),
    *(
        Case(name, lambda world: {"budget_id": world.budget}, budget_id=by_field(BUDGET_IDS))
        for name in ("get_budget_status", "read_budget_usage_and_limits", "reset_budget")
    ),
    Case(
        "list_budgets",
        lambda world: {},
        scope_type=by_field(TEXTS),
        scope_id=by_field(TEXTS),
        exhausted=by_field([5, "yes", 1]),
        prefix=by_field(TEXTS),
        owner_id=by_field(IDS[1:]),
        cursor=by_field([5, "x", "\0", "\ud800", b"x"]),
        limit=by_field(INTS),
    ),
    Case("find_budgets", lambda world: {"names": ["a"]}, names=by_field([*LISTS, None, ["\0"], [5], ["x"] * 1001])),
    Case(
        "report_usage",
        lambda world: {"authority": world.held.handle, "usage": {"t": 1}, "budgets": world.budget},
        authority=by_field(AUTHORITIES, "*"),
        usage=by_field(REPORTS, "*"),
        budgets=by_field(BUDGETS),
        place=by_field(PLACES),
    ),
    Case(
        "report_usage_many",
        lambda world: {
            "items": [Report(authority=world.held.handle, usage=Usage(custom={"t": 1}), budgets=(world.budget,))]
        },
        items=by_field(
            [
                None,
                5,
                "x",
                [5],
                [None],
                lambda world: [world.held.handle],
                lambda world: [CancelReservation(authority=world.held.handle, reservation_id=world.budget)],
            ]
        ),
    ),
    Case(
        "use_budgets",
        lambda world: {"items": [Settle(authority=world.held.handle, reservation_id=world.reservation, usage=Usage())]},
        items=by_field(
            [
                None,
                5,
                "x",
                [5],
                [None],
                lambda world: [world.held.handle],
                lambda world: [Settle(authority=world.held.handle, reservation_id="x", usage=Usage())],  # type: ignore[arg-type]
                lambda world: [Reserve(authority=world.held.handle, usage=5)],  # type: ignore[arg-type]
                lambda world: [Report(authority=5, usage=Usage())],  # type: ignore[arg-type]
            ],
            "*",
        ),
    ),
    Case(
        "report_usage_admin",
        lambda world: {"budget_id": world.budget, "dimensions": ["t"], "deltas": [1]},
        budget_id=by_field(BUDGET_IDS),
        dimensions=by_field([*LISTS, [], ["a", "b"], *([one] for one in DIMENSIONS)], "*"),
        deltas=by_field([*LISTS, [], [1, 2], *([one] for one in AMOUNTS)], "*"),
        dedup_key=by_field(KEYS),
    ),
    Case(
        "record_spend",
        lambda world: {"budget_id": world.budget, "execution_id": UNKNOWN, "deltas": {"t": 1}},
        budget_id=by_field(BUDGET_IDS),
        execution_id=by_field(IDS),
        deltas=by_field([None, *MAPS]),
        idempotency_key=by_field(KEYS),
    ),
    Case(
        "release_budget",
        lambda world: {"budget_id": world.budget, "execution_id": UNKNOWN},
        budget_id=by_field(BUDGET_IDS),
        execution_id=by_field(IDS),
    ),
    Case(
        "list_spend",
        lambda world: {"budget_id": world.budget},
        budget_id=by_field(BUDGET_IDS),
        execution_id=by_field(IDS[1:]),
        cursor=by_field(CURSORS),
        limit=by_field(INTS),
    ),
    Case(
        "reserve_usage",
        lambda world: {"authority": world.held.handle, "usage": {"t": 1}, "budgets": world.budget},
        authority=by_field(AUTHORITIES, "*"),
        usage=by_field(HELD, "*"),
        budgets=by_field(BUDGETS),
        on_lost=by_field([None, 5, "", "Charge", "keep", "\0"]),
        place=by_field(PLACES),
    ),
    Case(
        "settle_usage",
        lambda world: {
            "authority": world.held.handle,
            "reservation_id": world.reservation,
            "usage": {"t": 1},
        },
        authority=by_field(AUTHORITIES, "*"),
        reservation_id=by_field(BUDGET_IDS),
        usage=by_field(HELD, "*"),
    ),
    Case(
        "cancel_reservation",
        lambda world: {"authority": world.held.handle, "reservation_id": world.reservation},
        authority=by_field(AUTHORITIES, "*"),
        reservation_id=by_field(BUDGET_IDS),
    ),
    Case(
        "pause_for_budget",
        lambda world: {"authority": world.held.handle, "needs": {"t": 1}, "budgets": world.budget},
        authority=by_field(AUTHORITIES, "*"),
        needs=by_field([None, *MAPS]),
        budgets=by_field(BUDGETS),
    ),
    Case(
        "read_usage",
        lambda world: {"execution_id": world.waiting},
        execution_id=by_field(IDS),
        children=by_field(BOOLS),
        limit=by_field([0, *INTS[1:]]),
        after=by_field([*((value, UNKNOWN) for value in IDS[1:]), *((UNKNOWN, value) for value in IDS[1:])]),
    ),
    Case(
        "find_limits",
        lambda world: {"budgets": ["a"], "quotas": ["b"]},
        budgets=by_field([*LISTS, None, ["\0"], [5], [""], ["x"] * 1001]),
        quotas=by_field([*LISTS, None, ["\0"], [5], [""], ["x"] * 1001]),
    ),
    Case(
        "list_held",
        lambda world: {"limit_id": world.budget},
        limit_id=by_field(BUDGET_IDS),
        key=by_field(TEXTS),
        namespace=by_field(TEXTS),
        lane_ids=by_field([5, "x", [5], [""]]),
        kinds=by_field([5, "x", [5]]),
        tag=by_field([5, "x", ("a",), (5, "b")]),
        flow_id=by_field(UUIDS),
        parent_id=by_field(UUIDS),
        created_from=by_field([5, "x"]),
        created_before=by_field([5, "x"]),
        cursor=by_field([5, "x", "\0", "[]", '["a",1,"b","c"]']),
        limit=by_field(INTS),
    ),
    Case("read_held", lambda world: {"execution_id": world.waiting}, execution_id=by_field(IDS)),
    Case("count_held", lambda world: {}, limit=by_field([*INTS, 0])),
    Case("count_denials", lambda world: {}, limit=by_field([*INTS, 0, 10_001]), low_water=by_field(MOMENTS)),
    Case("find_unreported_budgets", lambda world: {}, limit=by_field([*INTS, 0, 1001])),
    Case("read_declared_limits", lambda world: {"names": ["a"]}, names=by_field([*LISTS, None, [5], [""]])),
    Case(
        "note_declared_limits",
        lambda world: {"digests": {"a": "b"}},
        digests=by_field([None, 5, "x", {"": "a"}, {"a": 5}, {"a": "\0"}, {5: "a"}]),
    ),
    *(
        Case(
            name,
            lambda world: {"limit_id": world.budget, "bind": Bind(kind="a")},
            limit_id=by_field(BUDGET_IDS),
            bind=by_field([None, 5, "lane", {"lane": "a"}]),
        )
        for name in ("bind_limit", "unbind_limit")
    ),
    Case(
        "bind_limit",
        lambda world: {"limit_id": world.budget, "bind": Bind(kind="a")},
        is_declared=by_field(BOOLS),
    ),
    Case(
        "list_bindings",
        lambda world: {},
        limit_id=by_field([5, "x", b"x"]),
        cursor=by_field([5, "x", "\0", "[]", '["a","b"]']),
        limit=by_field(INTS),
    ),
    Case("reset_due_budgets", lambda world: {}, limit=by_field([*INTS, 0, 1001]), low_water=by_field(MOMENTS)),
    Case(
        "collect_reservations",
        lambda world: {},
        limit=by_field([*INTS, 0, 1001]),
        marked=by_field(BOOLS),
        low_water=by_field(MOMENTS),
    ),
    Case(
        "reconcile_budget_counters",
        lambda world: {},
        after=by_field(UUIDS),
        spent_after=by_field(UUIDS),
        limit=by_field([*INTS, 0, 1001]),
    ),
]
