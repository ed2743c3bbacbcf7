"""The watcher: the parent of the postmaster, which stops the server once no process uses it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .locks import Lock, would_wait
from .place import (
    EmbeddedError,
    Place,
    readable_errors,
    remove_sockets,
    server_runs,
    stop_server,
    tidy,
)
from .starter import bring_up

_POLL_SECONDS = 0.25
_GRACE_SECONDS = 1.0


def watch(argv: Sequence[str]) -> NoReturn:
    place, start_fd, programs = Place(Path(argv[0])), int(argv[1]), Path(argv[2])
    settings = dict(item.split("=", 1) for item in argv[3:])
    if os.fork():
        os._exit(0)
    # Held until this process ends.
    watching = Lock(place.watcher, fcntl.LOCK_SH)
    server: tuple[subprocess.Popen[bytes] | None, Path] | None = None
    try:
        with readable_errors(place):
            server = bring_up(place, programs, settings)
        told = {"socket_dir": str(server[1])}
    except EmbeddedError as error:
        told = {"error": str(error)}
    os.close(start_fd)
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "w") as answer:
        json.dump(told, answer)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if server:
        _stop_when_unused(place, *server)
    watching.close()
    sys.exit()


def _stop_when_unused(place: Place, postgres: subprocess.Popen[bytes] | None, socket_dir: Path) -> None:
    while server_runs(place):
        if would_wait(place.users, fcntl.LOCK_EX):
            time.sleep(_POLL_SECONDS)
        else:
            time.sleep(_GRACE_SECONDS)
            unused = fcntl.LOCK_EX | fcntl.LOCK_NB
            with contextlib.suppress(OSError), Lock(place.users, unused, create=False):
                stop_server(place)
        if postgres:
            postgres.poll()
    if postgres and postgres.poll() is None and not place.server.exists():
        # The data directory was deleted or moved away under a running server.
        postgres.send_signal(signal.SIGQUIT)
        postgres.wait()
        remove_sockets(socket_dir)
        socket_dir.rmdir()
    tidy(place)
