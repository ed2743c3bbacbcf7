"""The context of synchronous handlers is generated from that of async handlers, and is up to date."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import flowfabric as ff
from flowfabric.app.context import Waitpoint
from flowfabric.app.sync_context import SyncWaitpoint

ROOT = Path(__file__).parents[2]
PARTS = ("scripts/sync_context.py", "src/flowfabric/app/context.py", "src/flowfabric/app/sync_context.py")


def _check(root: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, root / "scripts/sync_context.py", "--check"], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_the_generated_file_is_what_would_be_generated() -> None:
    assert _check(ROOT) == (0, "")


def test_the_check_sees_a_file_that_was_edited(tmp_path: Path) -> None:
    for part in PARTS:
        copy = tmp_path / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / part).read_text())
    edited = tmp_path / "src/flowfabric/app/context.py"
    edited.write_text(edited.read_text().replace("async def now(self)", "async def now(self, zone: str)"))
    code, text = _check(tmp_path)
    assert code == 1
    assert "sync_context.py is stale" in text


def _public(cls: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers_static(cls) if not name.startswith("_")}


def test_a_synchronous_context_has_what_an_async_one_has() -> None:
    assert _public(ff.SyncContext).keys() == _public(ff.Context).keys() | {"submit_flow"}
    assert _public(SyncWaitpoint).keys() == _public(Waitpoint).keys()
    for plain in (ff.SyncContext, SyncWaitpoint):
        assert not [name for name, member in _public(plain).items() if inspect.iscoroutinefunction(member)]


def test_its_methods_take_what_the_async_ones_take() -> None:
    differ = {"step", "step_with", "map"}  # no async functions, and no time limit in a thread
    for plain, of in ((ff.SyncContext, ff.Context), (SyncWaitpoint, Waitpoint)):
        members = _public(plain)
        for name, member in _public(of).items():
            if inspect.isfunction(member) and name not in differ:
                assert inspect.signature(members[name]).parameters == inspect.signature(member).parameters, name
