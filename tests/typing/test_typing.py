"""User code that must, and must not, type-check. The types are part of the public surface."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = """\
from datetime import datetime, timedelta
from typing import assert_type
from uuid import UUID

import flowfabric as ff
from flowfabric.models import Claimed


async def program(engine: ff.Engine, claimed: Claimed) -> None:
"""

GOOD = {
    "a_claim_may_find_nothing": """
        found = await engine.claim(worker_id="pool", worker_instance_id="pool-1")
        assert_type(found, Claimed | None)
        if found is not None:
            await engine.complete(found.handle, b"done")
    """,
    "create_answers_created_or_duplicate": """
        answer = await engine.create_execution(execution_kind="report", delay_until=timedelta(minutes=5))
        match answer:
            case ff.Created(execution_id, state):
                assert_type(state, ff.State)
            case ff.Duplicate(execution_id):
                pass
        assert_type(answer.execution_id, ff.ExecutionId)
    """,
    "a_batch_answers_one_verdict_per_item": """
        for verdict in await engine.create_many([ff.NewExecution(execution_kind="report")]):
            if isinstance(verdict, ff.FlowFabricError):
                raise verdict
            assert_type(verdict, ff.Created | ff.Duplicate)
    """,
    "holders_and_operators_end_an_execution": """
        await engine.complete(claimed.handle, b"done", result_encoding="text")
        await engine.complete(claimed.handle.fence)
        await engine.fail(ff.Operator(claimed.execution_id), "gone", failure_class=ff.FailureClass.PERMANENT)
    """,
    "policies_take_seconds_or_timedeltas": """
        ff.ExecutionPolicy(
            retry_policy=ff.RetryPolicy(max_retries=5, backoff=ff.Exponential(initial=1, maximum=timedelta(minutes=1))),
            timeout_policy=ff.TimeoutPolicy(attempt_timeout=30),
        )
    """,
    "events_are_followed_with_their_own_cursor": """
        page = await engine.read_events(family="lease", after=ff.EventCursor())
        assert_type(page.next_cursor, ff.EventCursor | None)
        assert_type(page.items[0].occurred_at, datetime)
    """,
    "connecting_gives_the_class_it_was_asked_of": """
        class Mine(ff.Engine):
            pass

        async with await Mine.connect() as mine, ff.Duties(mine):
            assert_type(mine, Mine)
    """,
    "a_lost_lease_says_which": """
        try:
            await engine.renew(claimed.handle)
        except ff.LeaseLost as lost:
            assert_type(lost.kind, str)
            assert_type(lost.execution_id, str | None)
    """,
}

# The code, and what the type checker must say about it.
BAD = {
    "an_unchecked_claim": (
        """
        found = await engine.claim(worker_id="pool", worker_instance_id="pool-1")
        await engine.complete(found.handle)
        """,
        r'has no attribute "handle".*union-attr',
    ),
    "a_kind_is_required": ("await engine.create_execution()", r'Missing named argument "execution_kind".*call-arg'),
    "a_misspelt_option": (
        'await engine.create_execution(execution_kind="report", delay=5)',
        r'Unexpected keyword argument "delay".*call-arg',
    ),
    "text_as_payload": (
        'await engine.create_execution(execution_kind="report", input_payload="text")',
        r'incompatible type "str"; expected "bytes".*arg-type',
    ),
    "an_id_in_place_of_an_authority": (
        "await engine.complete(claimed.execution_id)",
        r'incompatible type "ExecutionId".*arg-type',
    ),
    "an_operator_who_renews": (
        "await engine.renew(ff.Operator(claimed.execution_id))",
        r'incompatible type "Operator".*arg-type',
    ),
    "a_bare_uuid_in_place_of_an_id": (
        "await engine.read_execution(UUID(int=0))",
        r'incompatible type "UUID"; expected "ExecutionId".*arg-type',
    ),
    "a_changed_record": ("claimed.handle.lease_epoch = 7", r'"lease_epoch".*read-only.*misc'),
    "a_cursor_of_another_list": (
        "await engine.read_events(after=(await engine.find_executions()).next_cursor)",
        r"incompatible type \"Place \| None\".*arg-type",
    ),
}


def _program(body: str) -> str:
    return HEAD + indent(dedent(body).strip() + "\n", "    ")


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says about each program; all of them in one run, because most of a run is the package."""
    folder = tmp_path_factory.mktemp("programs")
    programs = GOOD | {name: code for name, (code, _) in BAD.items()}
    for name, code in programs.items():
        (folder / f"{name}.py").write_text(_program(code))
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = True\npretty = False\n[mypy-asyncpg.*]\nignore_missing_imports = True\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(folder / "cache"), "."],
        cwd=folder,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, str] = dict.fromkeys(programs, "")
    for line in done.stdout.splitlines():
        match = re.match(r"(\w+)\.py:(\d+): error: (.*)", line)
        if match is not None and match[1] in found:
            found[match[1]] += match[3] + "\n"
        else:
            assert match is None, f"an error outside the programs: {line}"
    return found


@pytest.mark.parametrize("name", GOOD)
def test_good_code_type_checks(name: str, messages: dict[str, str]) -> None:
    assert messages[name] == ""


@pytest.mark.parametrize("name", BAD)
def test_bad_code_is_found(name: str, messages: dict[str, str]) -> None:
    assert re.search(BAD[name][1], messages[name]), messages[name] or "nothing was found"
    assert messages[name].count("\n") == 1, "one mistake, one message"
