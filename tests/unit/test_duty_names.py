"""A duty has one name: its class, its file, what logs and metrics say, and the glossary."""

from __future__ import annotations

import re
from pathlib import Path

from flowfabric import _duties
from flowfabric._duties.timer import TimerDuty
from flowfabric.engine import Engine
from flowfabric.engine.timers import TimerKind

ROOT = Path(__file__).resolve().parents[2]


def test_every_duty_is_named_as_its_file_and_is_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
    for duty in _duties.ALL:
        assert duty.__module__ == f"flowfabric._duties.{duty.name}"
        assert duty.name.replace("_", "") == duty.__name__.lower()
        assert f"`{duty.name}`" in glossary


def test_the_glossary_names_the_timers_or_the_call_of_every_duty() -> None:
    glossary = (ROOT / "docs" / "concepts" / "glossary.md").read_text()
    runs = dict(re.findall(r"(?m)^\| `(\w+)` \| [^|]+ \| (timers `\w+`|`\w+`) \|$", glossary))
    assert set(runs) == {duty.name for duty in _duties.ALL} | {"schedules"}
    timers = {duty.name: f"timers `{duty.kind}`" for duty in _duties.ALL if issubclass(duty, TimerDuty)}
    assert len(timers) == len(TimerKind)
    assert {name: run for name, run in runs.items() if run.startswith("timers")} == timers
    for name, run in runs.items() - timers.items():
        assert hasattr(Engine, run.strip("`")), name
