"""Random handlers, random records and random changes: the dry run decides as a short model of the rule does."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

import flowfabric as ff
from flowfabric.values.attempt import AttemptType, Claimed
from flowfabric.values.history import History
from flowfabric.values.ids import ExecutionId, mint_uuid
from flowfabric.values.lease import Handle, HandleKind
from flowfabric.values.step import Step, StepKind
from flowfabric.worker.dry_run import DryRuns

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
SIGNAL = msgspec.json.encode(
    [
        {
            **dict.fromkeys(("name", "key", "category", "source_type", "source_identity", "correlation_id"), "x"),
            "signal_id": mint_uuid(),
            "accepted_at": LONG_AGO,
            "payload": None,
            "payload_encoding": "json",
        }
    ]
)


class Op(NamedTuple):
    kind: StepKind
    name: str


OPS = st.one_of(
    st.builds(Op, st.just("step"), st.sampled_from("abc")),
    st.builds(Op, st.just("wait"), st.sampled_from("vw")),
    st.just(Op("sleep", "sleep")),
    st.just(Op("now", "now")),
)
PROGRAMS = st.lists(OPS, min_size=1, max_size=7)


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Op], int, list[Op]]:
    """A program, how many of its operations are recorded, and the program after a few edits."""
    before = draw(PROGRAMS)
    recorded = draw(st.integers(0, len(before)))
    after = list(before)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(after)))
        match draw(st.sampled_from(["insert", "remove", "replace", "swap"])):
            case "insert":
                after.insert(place, draw(OPS))
            case "remove" if place < len(after):
                del after[place]
            case "replace" if place < len(after):
                after[place] = draw(OPS)
            case "swap" if place + 1 < len(after):
                after[place], after[place + 1] = after[place + 1], after[place]
    return before, recorded, after


def keys(program: list[Op]) -> list[tuple[StepKind, str, int]]:
    uses: Counter[Op] = Counter()
    found = []
    for op in program:
        found.append((op.kind, op.name, uses[op]))
        uses[op] += 1
    return found


def expected(record: list[tuple[StepKind, str, int]], after: list[Op], *, is_open: bool) -> str:
    """The rule: something new while something recorded is missing is a change."""
    missing = {key for key in record if key[0] in ("step", "wait")}
    for key in keys(after):
        if key in record:
            missing.discard(key)
            if is_open and key == record[-1]:
                return "stops" if missing else "continues"  # it waits there
        elif key[0] != "now":
            return "stops" if missing else "continues"
    return "stops" if any(use == 0 for _, _, use in missing) else "continues"


def history(record: list[tuple[StepKind, str, int]], *, is_open: bool) -> History:
    execution = ExecutionId(mint_uuid())
    handle = Handle(
        partition=0, uuid=execution, attempt_index=0, attempt_id=mint_uuid(), lease_id=mint_uuid(), lease_epoch=0,
        lease_ttl=timedelta(), lane_id="default", worker_instance_id="", kind=HandleKind.RESUMED,
    )  # fmt: skip
    claimed = Claimed(
        handle=handle, lease_expires_at=datetime.now(UTC), attempt_type=AttemptType.INITIAL, execution_kind="job",
        namespace="", flow_id=None, priority=0, created_at=LONG_AGO, input_payload=b"{}", payload_encoding=None,
        tags={}, deadline_at=None, attempt_timeout_at=None, retry_count=0, reclaim_count=0, replay_count=0,
    )  # fmt: skip
    steps = []
    for place, (kind, name, n) in enumerate(record):
        ends = kind == "wait" and not (is_open and place == len(record) - 1)
        steps.append(
            Step(
                execution_id=execution, generation=0, name=name, n=n, kind=kind, run=0, attempt_index=0,
                result=SIGNAL if ends else None, encoding=None, error=None,
                at=LONG_AGO if kind in ("sleep", "now") else None, child_id=None, seconds=None, recorded_at=LONG_AGO,
                waitpoint_ids=(mint_uuid(),) if kind == "wait" else (), outcome="resumed" if ends else None,
            )
        )  # fmt: skip
    return History(claimed=claimed, steps=steps)


def handler(program: list[Op], did: list[str]) -> Any:
    async def job(ctx: ff.Context) -> None:
        for op in program:
            match op.kind:
                case "step":
                    await ctx.step(op.name, did.append, op.name)
                case "wait":
                    await ctx.wait_for(op.name)
                case "sleep":
                    await ctx.sleep(timedelta(days=1))
                case "now":
                    await ctx.now()

    return job


@settings(max_examples=300, deadline=None)
@given(changes(), st.booleans())
def test_a_dry_run_decides_as_the_rule_says_and_does_nothing(
    change: tuple[list[Op], int, list[Op]], is_open: bool
) -> None:
    before, count, after = change
    record = keys(before)[:count]
    is_open = is_open and bool(record) and record[-1][0] == "wait"
    did: list[str] = []
    app = ff.App("postgresql://nobody@nowhere/nothing")
    app.task(name="job")(handler(after, did))

    async def check() -> Any:
        async with DryRuns(app) as runs:
            return await runs.check(history(record, is_open=is_open))

    fit = asyncio.run(check())
    assert fit.verdict == expected(record, after, is_open=is_open), fit.why
    assert did == []
