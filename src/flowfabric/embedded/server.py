"""The embedded Postgres, which runs in a data directory of the project.

This package finds the server's programs, makes the database, starts the server on first use, lets any number of
processes share it and stops it when the last one is gone. It opens no connections: it returns a DSN. It needs POSIX
(flock, Unix sockets), so import it only when an embedded server is wanted.

A pid never tells whether a process is alive, because pids are wrong after a crash, in containers and for zombies.
The kernel drops a flock with the last process that holds it, however that process died:

    users.lock     shared, by every process that uses the server
    start.lock     exclusive, by the process that starts or stops it; the watcher inherits it until the server is ready
    server.lock    exclusive, inherited by the postmaster and through it by every backend
    watcher.lock   shared, by the watcher: this folder run as a script, detached, the parent of the postmaster

The watcher stops the server once no process holds users.lock. A server whose watcher was killed gets a new one at
the next start.

As root the server runs as the account that owns its files. That account may be unable to enter the
directories above them, so on Linux it gets its data directory as an open descriptor, and programs it cannot
reach as a copy.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from flowfabric.settings import load

from .locks import Lock, would_wait
from .place import (
    DATABASE,
    PORT,
    SUPERUSER,
    EmbeddedError,
    Place,
    is_shutting_down,
    log_tail,
    readable_errors,
    server_runs,
    stop_server,
    tidy,
)
from .programs import find_programs, major_of

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class EmbeddedServer:
    """A running server and this process's claim on it. It stays up while any process has a claim."""

    data_dir: Path
    dsn: str
    _claim: _Claim = field(repr=False, compare=False)

    def release(self) -> None:
        """Give the claim up. Safe to call repeatedly; a process that ends in any way releases it too."""
        with _process.mutex:
            self._claim.drop()


def start(
    data_dir: Path | None = None, *, settings: Mapping[str, str] | None = None, patience: float | None = None
) -> EmbeddedServer:
    """Use the server in `data_dir`, starting it if it does not run. Blocks until it accepts connections.

    `data_dir` defaults to the one in the settings. `settings` are server settings, used if this call starts it; a
    running server keeps its own. After `patience` seconds it raises `EmbeddedError`; the start itself continues.
    """
    place = _place(data_dir)
    deadline = None if patience is None else time.monotonic() + patience
    with _process.mutex, readable_errors(place):
        place.prepare()
        held = _process.held.get(place.root)
        if held and not held.lock.is_on(place.users):
            # The directory was deleted or moved away since, and this is a new one.
            held.lock.close()
            held = None
        if held is None:
            # Waits while a watcher that found no users stops the server.
            held = _process.held[place.root] = _Held(_lock(place, place.users, fcntl.LOCK_SH, deadline))
        claim = _Claim(place.root, held)
        if not place.pgdata.exists() and sys.stderr is not None and sys.stderr.isatty():
            print(f"flowfabric: creating a database in {place.root}; this takes some seconds, once", file=sys.stderr)
        try:
            socket_dir, _ = _ensure_running(place, settings or {}, deadline=deadline)
        except BaseException:
            claim.drop()
            raise
    host = quote(str(socket_dir), safe="/")
    dsn = f"postgresql://{SUPERUSER}@/{DATABASE}?host={host}&port={PORT}"
    return EmbeddedServer(data_dir=place.root, dsn=dsn, _claim=claim)


def stop(data_dir: Path) -> None:
    """Stop the server now, even if it is in use. Does nothing if it does not run."""
    place = Place(data_dir)
    if not place.server.exists():
        return
    with readable_errors(place), Lock(place.start, fcntl.LOCK_EX):
        place.stopped.touch()
        stop_server(place)
        tidy(place)


def revive(data_dir: Path) -> Literal["", "died", "shutting_down"]:
    """Start a server again that died or is shutting down while processes use it; returns what was wrong if this did.

    Any number of them may call it at the same time. A server that was stopped on purpose, or whose data are gone, stays
    as it is. One that is shutting down loses its connections, because it would wait for them.
    """
    place = Place(data_dir)
    was_ending = is_shutting_down(place)
    if (server_runs(place) and not was_ending) or not place.should_run():
        return ""
    with readable_errors(place):
        is_new = _ensure_running(place, {}, is_wanted=place.should_run)[1]
    return "" if not is_new else "shutting_down" if was_ending else "died"


def is_running(data_dir: Path | None = None) -> bool:
    """Whether any process is running the server."""
    return server_runs(_place(data_dir))


def discard(data_dir: Path | None = None, *, keep: bool = False) -> Path | None:
    """Stop the server now, even if it is in use, and delete its data; with `keep` the data are moved aside instead.

    Returns where to. The next start begins with an empty database.
    """
    place = _place(data_dir)
    if not place.pgdata.exists():
        return None
    with readable_errors(place), Lock(place.start, fcntl.LOCK_EX):
        place.stopped.touch()
        stop_server(place)
        tidy(place)
        if keep:
            aside = place.root / f"pgdata.of-{place.major() or 'unknown'}-{time.strftime('%Y%m%d-%H%M%S')}"
            os.rename(place.pgdata, aside)
            return aside
        # Renamed to an unfinished name first: after a crash, the next start deletes the rest.
        dying = place.root / f"pgdata.new-discarded-{os.getpid()}"
        os.rename(place.pgdata, dying)
        shutil.rmtree(dying)
    return None


def majors(data_dir: Path | None = None) -> tuple[str | None, str]:
    """The major versions of the data (None before there are any) and of the installed programs."""
    return _place(data_dir).major(), str(major_of(find_programs(load().pg_bin)))


def program(name: str) -> Path:
    """The path of a Postgres program (psql, pg_dump) of the installation the embedded server uses."""
    return find_programs(load().pg_bin) / name


def _place(data_dir: Path | None) -> Place:
    return Place(load().data_dir if data_dir is None else data_dir)


@dataclass
class _Held:
    """This process's one lock on users.lock of a data directory, and how many claims share it."""

    lock: Lock
    claims: int = 0


class _Claim:
    def __init__(self, root: Path, held: _Held) -> None:
        self._root = root
        self._held: _Held | None = held
        held.claims += 1

    def drop(self) -> None:
        held, self._held = self._held, None
        # In a forked child the table is empty: an inherited claim belongs to the parent.
        if held is None or _process.held.get(self._root) is not held:
            return
        held.claims -= 1
        if held.claims == 0:
            del _process.held[self._root]
            held.lock.close()
            tidy(Place(self._root))


class _Process:
    """The servers that this process uses, by data directory."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.held: dict[Path, _Held] = {}

    def release_all(self) -> None:
        self.held.clear()
        Lock.close_all()

    def forget_parent(self) -> None:
        # Another thread of the parent may have held the mutex; it does not exist here to release it.
        self.mutex = threading.Lock()
        self.release_all()


_process = _Process()
os.register_at_fork(after_in_child=_process.forget_parent)
atexit.register(_process.release_all)


def _ensure_running(
    place: Place,
    settings: Mapping[str, str],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
    deadline: float | None = None,
) -> tuple[Path, bool]:
    """Return the socket directory of a server that accepts connections and has a watcher, and whether it is new."""
    with _lock(place, place.start, fcntl.LOCK_EX, deadline) as start_lock:
        if server_runs(place) and would_wait(place.watcher, fcntl.LOCK_EX):
            postmaster = place.postmaster()
            if postmaster and postmaster.is_ready and postmaster.answers() == "yes":
                return postmaster.socket_dir, False
        if not is_wanted():
            return place.root, False
        place.stopped.unlink(missing_ok=True)
        arguments = [str(place.root), str(start_lock.fd), str(find_programs(load().pg_bin))]
        arguments += [f"{name}={value}" for name, value in settings.items()]
        # The process started here forks the watcher and ends, so the user's process has no child to wait for.
        try:
            answer = subprocess.run(
                [sys.executable, "-I", "-S", os.path.dirname(__file__), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd="/",
                pass_fds=(start_lock.fd,),
                start_new_session=True,
                check=False,
                timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0),
            )
        except subprocess.TimeoutExpired:
            raise _too_late(place, "does not accept connections yet") from None
    try:
        told = json.loads(answer.stdout)
    except ValueError:
        last = answer.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it was killed"]
        raise EmbeddedError(f"the watcher of the embedded Postgres in {place.root} died: {last[0]}") from None
    if "error" in told:
        raise EmbeddedError(told["error"])
    return Path(told["socket_dir"]), True


def _lock(place: Place, path: Path, operation: int, deadline: float | None) -> Lock:
    """Take a lock, which another process may hold while it starts or stops the server."""
    while deadline is not None:
        try:
            return Lock(path, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _too_late(place, "is being started or stopped by another process") from None
        time.sleep(_POLL_SECONDS)
    return Lock(path, operation)


def _too_late(place: Place, what: str) -> EmbeddedError:
    return EmbeddedError(f"the embedded Postgres in {place.root} {what}; try again later{log_tail(place)}")
