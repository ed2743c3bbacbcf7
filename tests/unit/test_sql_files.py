"""How the SQL is laid out: chapters, one public function per file, headers, and settings that name what exists."""

from __future__ import annotations

import ast
import re
from importlib import resources
from pathlib import Path

import pytest

import flowfabric
from flowfabric._postgres import build

_SQL = re.compile(r"(?i)\s*(select\s|insert into |delete from |update .* set |with \w+ as |set_config\()")
_CREATE = re.compile(r"(?m)^create or replace function flowfabric\.(\w+)\(")
FILES = {path.removeprefix("functions/"): sql for path, sql in build.sql_files("functions")}

# From the bottom up: a chapter calls those before it, and itself. `functions/README.md` says why some calls go upwards.
CHAPTERS = (
    "common", "keys", "lanes", "workers", "queue", "limits", "events", "leases", "grants", "executions",
    "steps", "streams", "waits", "flows", "quotas", "budgets", "schedules", "duties", "reads", "server", "audit",
)  # fmt: skip
UPWARDS = {
    "end_capped": {"end_executions"},
    "end_executions": {"end_waits", "forget_waits", "wake_parents", "cascade_ended", "end_reservations"},
    "schedule_retries": {"end_waits", "gate", "end_reservations"},
    "purge_rows": {"drop_frames", "drop_owned", "forget_usage"},
    "redact_execution": {"drop_frames"},
    "renew_children": {"finish_cancel"},
    "replay": {"forget_signals", "ack_cancel_member", "reset_groups"},
    "make_ready": {"gate"},
    "drop_ready": {"give_slots"},
    "take_admitted": {"exhausted_budgets", "hold_budgets"},
    "promote_limited": {"exhausted_budgets", "budgets_cover"},
    "take_ready": {"end_capped", "reclaim_cap"},
    "start_attempts": {"move_waitpoints", "inputs_of"},
    "claim_one": {"inputs_of"},
    "raise_floors": {"create_one"},  # asks who may call it
    "may_operate": {"complete_as_operator"},  # asks who may call it
    "give_back": {"gate", "end_reservations"},
    "grow_flow": {"create_owned"},
    "insert_executions": {"create_owned"},
    "mark_expired": {"end_reservations"},
    "purge_flows": {"drop_owned"},
    "revoke_lease": {"end_reservations"},
    "stop_changed": {"end_reservations"},
    "give_up_lease": {"end_reservations"},
    "resume": {"gate"},
    "log_worker": {"open_log"},
}


def functions(sql: str) -> list[str]:
    """The names of the functions of a file, in order."""
    return _CREATE.findall(sql)


def body(sql: str, name: str) -> str:
    start = sql.index(f"function flowfabric.{name}(")
    return sql[start : sql.index("$$;\n", start)]


def test_no_other_folder_has_sql() -> None:
    package = Path(flowfabric.__file__).parent
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if "_postgres" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SQL.match(node.value)
    ]
    assert found == []


def test_every_file_is_in_a_chapter_and_they_load_in_one_order() -> None:
    assert {path.partition("/")[0] for path in FILES} == set(CHAPTERS)
    assert all(path.count("/") == 1 for path in FILES)
    assert list(FILES) == sorted(FILES)


def test_chapters_call_downwards_but_for_the_calls_that_are_listed() -> None:
    level = {name: CHAPTERS.index(path.partition("/")[0]) for path, sql in FILES.items() for name in functions(sql)}
    found = {}
    for path, sql in FILES.items():
        code = re.sub(r"(?m)^\s*--.*$", "", sql)
        called = {name for name in re.findall(r"flowfabric\.(\w+)\(", code) if name in level}
        if upwards := {name for name in called if level[name] > CHAPTERS.index(path.partition("/")[0])}:
            found[path.rpartition("/")[2].removesuffix(".sql")] = upwards
    assert found == UPWARDS


def test_a_file_has_at_most_one_public_function_and_is_named_after_it() -> None:
    for path, sql in FILES.items():
        public = [name for name in functions(sql) if "security definer" in body(sql, name).partition("$$")[0]]
        assert len(public) <= 1, path
        if public:
            assert path.endswith(f"/{public[0]}.sql"), path


def test_a_file_is_named_after_its_first_function_or_its_rule() -> None:
    collections = {"common/clock.sql", "common/constants.sql", "waits/conditions.sql"}
    for path, sql in FILES.items():
        first, *_ = functions(sql)
        stem = path.rpartition("/")[2].removesuffix(".sql")
        if path not in collections:
            assert stem in (first, first.removeprefix("audit_")), path


def test_no_function_is_defined_twice() -> None:
    names = [name for sql in FILES.values() for name in functions(sql)]
    assert len(names) == len(set(names))


def test_every_function_has_a_header_that_begins_with_its_name() -> None:
    for path, sql in FILES.items():
        lines = sql.splitlines()
        for name in functions(sql):
            at = next(
                i for i, line in enumerate(lines) if line.startswith(f"create or replace function flowfabric.{name}(")
            )
            header = at
            while header and lines[header - 1].startswith("--"):
                header -= 1
            assert lines[header].startswith(f"-- {name}: "), f"{path}: {name}"


def test_no_function_sets_anything_itself() -> None:
    for path, sql in FILES.items():
        for name in functions(sql):
            assert " set " not in body(sql, name).partition("$$")[0].replace("\n", " "), f"{path}: {name}"


def test_rows_found_by_position_are_not_looked_up_by_id() -> None:
    """An index that has the id somewhere would be read whole, if its table was empty when it was analyzed."""
    by_both = re.compile(r"ctid = any \(\w+\)\s+and \w+\.id = any")
    assert by_both.search("where r.ctid = any (v_tids) and r.id = any (v_ids)")
    assert [path for path, sql in FILES.items() if by_both.search(sql)] == []


@pytest.mark.parametrize("number", ["1174405120", "00000000-0000-0000-0000-000000000000"])
def test_a_constant_is_defined_once(number: str) -> None:
    assert [path for path, sql in FILES.items() if number in sql] == ["common/constants.sql"]


def asked_in(path: str, name: str) -> set[str]:
    return set(re.findall(r" from flowfabric\.(audit_\w+)\(", body(FILES[path], name)))


def test_every_rule_of_the_audit_is_asked() -> None:
    found = {name for path, sql in FILES.items() if path.startswith("audit/") for name in functions(sql)}
    rules = found - {"audit", "audit_by_key", "audit_sample", "repair_floors"}
    asked = asked_in("audit/audit.sql", "audit") | asked_in("audit/audit.sql", "audit_log")
    assert asked | asked_in("audit/audit_by_key.sql", "audit_by_key") == rules | {"audit_by_key"}


# Rules about queues, timers, routes, keys, limits and workers: with them a sample would read whole tables.
NOT_SAMPLED = {
    "blocked_orphan", "cascade_row", "derived_route", "flow_summary", "grant_hides", "keystore", "lane_registered",
    "ready_below_floor", "ready_orphan", "registration_facts", "tag_rows", "timer_waitpoint", "timers", "times_finite",
    "verdict_facts", "blocked_limit", "budget_counters", "budget_held", "budget_ledger", "budget_limits", "budget_mark",
    "budget_rows", "limit_binding", "limit_open", "limit_set", "quota_cap", "quota_rate", "quota_slot",
    "quota_slot_missing", "waiter_missed", "waits_for_nothing",
}  # fmt: skip


def test_the_audit_of_a_sample_leaves_out_only_rules_that_need_whole_tables() -> None:
    assert asked_in("audit/audit_sample.sql", "audit_sample") == {"audit_by_key"}
    asked = asked_in("audit/audit.sql", "audit")
    assert asked == {f"audit_{rule}" for rule in NOT_SAMPLED} | {"audit_by_key", "audit_log"}
    assert not asked & asked_in("audit/audit_by_key.sql", "audit_by_key")


def test_the_settings_name_functions_once() -> None:
    text = (resources.files("flowfabric._postgres") / "sql" / "settings.sql").read_text()
    named = [name for group in re.findall(r"(?<=,)\s*'([a-z_\s]+)'\)", text) for name in group.split()]
    known = {name for sql in FILES.values() for name in functions(sql)}
    assert len(named) > 40
    assert len(named) == len(set(named))
    assert set(named) <= known
