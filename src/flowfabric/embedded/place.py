"""The data directory of an embedded server: its names, its state, its log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .locks import Lock, would_wait

try:
    from flowfabric.errors import ConnectionFailed
except ImportError:
    # The watcher lives as long as the server: it runs this folder alone, without the package around it and its imports.
    class ConnectionFailed(Exception):  # type: ignore[no-redef]
        def __init__(self, kind: str, detail: str) -> None:
            super().__init__(detail)


DATABASE = "flowfabric"
SUPERUSER = "postgres"
SOCKET_PREFIX = "flowfabric-"
# The port is only part of the socket's name.
PORT = 5432
_STOP_SECONDS = 60.0


class EmbeddedError(ConnectionFailed):
    """The embedded Postgres cannot be started or stopped. The message says why and quotes the log."""

    def __init__(self, message: str) -> None:
        super().__init__("unreachable", message)

    def _message(self) -> str:
        return self.detail


class Place:
    """The names inside a data directory."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir.expanduser().resolve()
        self.users = self.root / "users.lock"
        self.start = self.root / "start.lock"
        self.server = self.root / "server.lock"
        self.watcher = self.root / "watcher.lock"
        self.stopped = self.root / "stopped"  # the server was stopped on purpose
        self.pgdata = self.root / "pgdata"
        self.log = self.root / "postgres.log"
        # A symbolic link to the socket directory, which is elsewhere because socket paths must be short.
        self.socket_link = self.root / "socket"

    def prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        ignore = self.root / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")

    def should_run(self) -> bool:
        """Whether a server that does not run has died: its data are here, and it was not stopped on purpose."""
        return self.pgdata.exists() and not self.stopped.exists()

    def major(self) -> str | None:
        """The major version of the data, if there are any."""
        try:
            return (self.pgdata / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            return None

    def postmaster(self) -> _Postmaster | None:
        """Return the contents of postmaster.pid, which are valid only while server.lock is held."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return None
        if len(lines) < 5 or not lines[0].isdigit():
            return None
        status = lines[7].strip() if len(lines) > 7 else ""
        return _Postmaster(int(lines[0]), Path(lines[4]), is_ready=status == "ready", is_stopping=status == "stopping")


@dataclass(frozen=True)
class _Postmaster:
    pid: int
    socket_dir: Path
    is_ready: bool
    is_stopping: bool

    @property
    def socket(self) -> Path:
        return self.socket_dir / f".s.PGSQL.{PORT}"

    def answers(self) -> Literal["yes", "no", "unreachable"]:
        """Return whether the server listens: `no` if it is dead, `unreachable` if its socket was deleted."""
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.socket))
            except FileNotFoundError:
                return "unreachable"
            except ConnectionRefusedError:
                return "no"
        return "yes"


@contextlib.contextmanager
def readable_errors(place: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the embedded Postgres cannot use {place.root}: {error.strerror or error}"
        if error.filename:
            message += f" ({error.filename})"
        raise EmbeddedError(message) from error


def server_runs(place: Place) -> bool:
    return would_wait(place.server, fcntl.LOCK_SH)


def is_shutting_down(place: Place) -> bool:
    """Whether the server runs and refuses connections because it was asked to stop.

    A postmaster that gets SIGTERM waits for its clients to leave, and those of a worker or a web app never do.
    """
    if not server_runs(place):
        return False
    postmaster = place.postmaster()
    return postmaster is not None and postmaster.is_stopping


def stop_server(place: Place) -> None:
    """Stop with a fast shutdown; if that takes too long, an immediate one, after which the next start recovers."""
    for how, seconds in ((signal.SIGINT, _STOP_SECONDS), (signal.SIGQUIT, _STOP_SECONDS)):
        signalled = None
        deadline = time.monotonic() + seconds
        while server_runs(place):
            postmaster = place.postmaster()
            # Backends outlive a killed postmaster and hold the lock too; its pid may belong to another process by now.
            listens = postmaster and (postmaster.is_ready or postmaster.is_stopping)
            is_dead = postmaster and listens and postmaster.answers() == "no"
            if postmaster and not is_dead and postmaster.pid != signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(postmaster.pid, how)
                signalled = postmaster.pid
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
    raise EmbeddedError(f"the embedded Postgres in {place.root} does not stop{log_tail(place)}")


def tidy(place: Place) -> None:
    """Remove the socket directory of a stopped server. While it has users, their DSN must stay valid."""
    with contextlib.suppress(OSError), Lock(place.users, fcntl.LOCK_EX | fcntl.LOCK_NB, create=False):
        if not server_runs(place):
            socket_dir = Path(os.readlink(place.socket_link))
            if is_ours(socket_dir, place.pgdata.stat().st_uid):
                remove_sockets(socket_dir)
                socket_dir.rmdir()
            place.socket_link.unlink()


def is_ours(socket_dir: Path, uid: int) -> bool:
    """Whether a link leads to a directory that we made for sockets; a link in a cloned repository may lead anywhere."""
    found = os.lstat(socket_dir)
    return (
        socket_dir.name.startswith(SOCKET_PREFIX)
        and stat.S_ISDIR(found.st_mode)
        and found.st_uid == uid
        and not found.st_mode & 0o077
    )


def remove_sockets(socket_dir: Path) -> None:
    for name in (f".s.PGSQL.{PORT}", f".s.PGSQL.{PORT}.lock"):
        (socket_dir / name).unlink(missing_ok=True)


def log_tail(place: Place, start: int = 0) -> str:
    try:
        with open(place.log, "rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()[-8:]
    except OSError:
        return ""
    return f"; the log is {place.log}" + (", its last lines:\n  " + "\n  ".join(lines) if lines else "")
