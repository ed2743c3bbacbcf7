"""Where the servers of a test run keep their data."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ROOM = 3 << 30


def place_of_data(shared: Path) -> Path:
    """The folder in which this run's servers keep their data: in memory where there is room for it.

    Every process of the run asks, and holds a lock for as long as it lives. A process of its own waits for that lock
    and then deletes the folder, so that nothing stays in memory after a run that was killed.
    """
    with open(shared / "place.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = shared / "place"
        if told.exists():
            place = Path(told.read_text())
            _hold(place)
            return place
        if not (os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM):
            told.write_text(str(shared))
            return shared
        place = Path(tempfile.mkdtemp(prefix="flowfabric-tests-", dir=_MEMORY))
        _hold(place)
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CLEAN, str(place)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        ).returncode = 0  # never waited for: it outlives us
        told.write_text(str(place))
        return place


_CLEAN = """
import fcntl, pathlib, shutil, sys, time
place = pathlib.Path(sys.argv[1])
fcntl.flock(open(place / "run.lock"), fcntl.LOCK_EX)
for server in place.glob("*/server.lock"):
    fcntl.flock(open(server), fcntl.LOCK_EX)
for _ in range(20):
    shutil.rmtree(place, ignore_errors=True)
    time.sleep(0.5)  # the watcher of a server writes a last time
    if not place.exists():
        break
"""

_locks: dict[Path, int] = {}


def _hold(place: Path) -> None:
    if place.parent == _MEMORY and place not in _locks:
        _locks[place] = os.open(place / "run.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(_locks[place], fcntl.LOCK_SH)
