"""Every example runs as a program of its own, on a data directory of its own, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "crash_and_reclaim.py": [r"worker-1 was killed with SIGKILL and held \d+ leases", "300 of 300", "nothing wrong"],
    "first_execution.py": ["b'hello world'"],
    "submit_in_transaction.py": ["lamp: waiting", "chair: chair is sold out", "1 order, 1 execution waiting"],
}


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with its own data directory; afterwards nobody may be left who lives in it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("FLOWFABRIC_")}
    env["FLOWFABRIC_DATA_DIR"] = str(tmp_path / "data")
    yield env
    until = time.monotonic() + 60
    while left := _inhabitants(env["FLOWFABRIC_DATA_DIR"]):
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.1)


def _inhabitants(data_dir: str) -> list[str]:
    """The processes that were started with this data directory, where the system can tell."""
    mark = f"FLOWFABRIC_DATA_DIR={data_dir}\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes() + b"\0":
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_runs_again(example: Path, surroundings: dict[str, str]) -> None:
    command = [sys.executable, "-W", "error", str(example)]
    runs = 1 if example.name == "crash_and_reclaim.py" else 2  # a long one; the interrupted demo below runs it again
    for _ in range(runs):
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=170, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        for words in SAYS[example.name]:
            assert re.search(words, done.stdout), done.stdout
    if example.name == "crash_and_reclaim.py":
        reclaimed = re.search(r"reclaimed\s+│\s+(\d+)", done.stdout)
        assert reclaimed is not None
        assert int(reclaimed[1]) > 0, done.stdout


def test_an_interrupted_demo_leaves_no_process_and_can_run_again(surroundings: dict[str, str]) -> None:
    command = [sys.executable, str(ROOT / "examples" / "crash_and_reclaim.py")]
    for _ in range(2):
        with subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True) as demo:
            assert demo.stdout is not None
            for line in demo.stdout:
                if " finished, " in line:
                    break  # both workers are at it
            demo.send_signal(signal.SIGINT)
            demo.stdout.read()
        assert demo.returncode == 130
