"""The pictures are what the script draws, each is on a page, and flows really reach the states they show."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest

import flowfabric as ff
from flowfabric._postgres import build
from flowfabric.values.attempt import Claimed
from flowfabric.values.budget import ReservationState
from flowfabric.values.execution import NewExecution
from flowfabric.values.graph import NewEdge, NewNode
from flowfabric.values.ids import FlowId
from tests.docs.pages import PAGES, ROOT, load

SCRIPT = load(ROOT / "scripts" / "pictures.py", "draw_pictures")


@pytest.mark.parametrize("name", SCRIPT.drawn())
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    assert (SCRIPT.TARGET / name).read_text(encoding="utf-8") == SCRIPT.drawn()[name], "run scripts/pictures.py"


def test_the_picture_of_a_stream_has_every_reason_that_closes_one() -> None:
    sql = dict(build.sql_files("functions"))["functions/streams/closed_as.sql"]
    reasons = set(re.findall(r"(?:then|else) '([a-z_]+)'(?! \|\|)", sql)) | {"lease_expired", "lease_revoked"}
    shown = {close.reason for close in (*SCRIPT.LIFE, SCRIPT.RECLAIMED)}
    assert shown == reasons
    page = (ROOT / "docs" / "concepts" / "streams.md").read_text(encoding="utf-8")
    assert [reason for reason in shown if f"`{reason}`" not in page] == []


def test_the_picture_of_a_reservation_has_every_state_that_is_stored() -> None:
    assert set(get_args(ReservationState)) <= set(SCRIPT.LIVES["limit-reservation"].places)


def test_a_picture_that_differs_is_named_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SCRIPT, "TARGET", tmp_path)
    monkeypatch.setattr(sys, "argv", ["pictures.py"])
    assert SCRIPT.main() == 0
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--check"])
    assert SCRIPT.main() == 0
    (tmp_path / "flow-race.svg").write_text("other")
    assert SCRIPT.main() == 1
    assert "(flow-race.svg)" in capsys.readouterr().out
    assert (tmp_path / "flow-race.svg").read_text() == "other"


def test_every_picture_is_drawn_by_the_script_and_shown_on_a_page() -> None:
    drawn = set(SCRIPT.drawn())
    assert {file.name for file in (ROOT / "docs").rglob("*.svg")} == drawn
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {link.rsplit("/", 1)[-1] for link in re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", text)} == drawn


@pytest.mark.parametrize("name", SCRIPT.SAMPLES)
async def test_a_flow_reaches_the_states_in_the_picture(name: str, plain_engine: ff.Engine) -> None:
    sample = SCRIPT.SAMPLES[name]
    flow_id = await _play(plain_engine, SCRIPT.SAMPLES[sample.follows or name])
    if sample.follows is not None:
        ended = [
            member.execution_id
            for member in await plain_engine.list_flow_members(flow_id)
            if member.state.is_terminal and member.state is not ff.State.COMPLETED
        ]
        await plain_engine.replay_many(ended)
    if sample.cancelled is not None:
        await plain_engine.cancel_flow(flow_id, policy=sample.cancelled, wait=True)
    await _work_off(plain_engine)
    states = {member.name: member.state for member in await plain_engine.list_flow_members(flow_id)}
    assert states == {member: about.state for member, about in sample.members.items()}


async def _play(engine: ff.Engine, sample: object) -> FlowId:
    """Submit a sample and end what its workers have ended; what is claimed beside that stays with its worker."""
    members = sample.members  # type: ignore[attr-defined]
    nodes = [
        NewNode(
            name=name,
            execution=NewExecution(execution_kind=about.kind or name, input_payload=name.encode()),
            after=[NewEdge(upstream=upstream) for upstream in about.after],
            policy=about.policy,
        )
        for name, about in members.items()
    ]
    submitted = await engine.submit_flow(nodes)
    while claims := await engine.claim_many(limit=1000, worker_id="w", worker_instance_id="w1"):
        by_state: dict[ff.State, list[Claimed]] = {}
        for claimed in claims:
            assert claimed.input_payload is not None
            by_state.setdefault(members[claimed.input_payload.decode()].state, []).append(claimed)
        await engine.complete_many([one.handle for one in by_state.get(ff.State.COMPLETED, [])])
        for one in by_state.get(ff.State.FAILED, []):
            await engine.fail(one.handle, "as drawn")
        await _work_off(engine)
    return submitted.flow_id


async def _work_off(engine: ff.Engine) -> None:
    while (await engine.cancel_siblings()).action != "none":
        pass
    while (await engine.dispatch_cascades()).seen:
        pass
