"""`flowfabric dev`: a database, a worker and a server, restarted whenever a file changes.

The worker and the server run in processes of their own and load the code afresh each time. This process watches the
files, keeps the embedded database running across restarts, and forwards signals.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import address, is_embedded
from flowfabric.cli._loading import AppName
from flowfabric.cli._options import Dsn, parse_duration
from flowfabric.cli.worker import Concurrency, LaneWeights, LogJson, LogLevel, check_level, weights
from flowfabric.errors import InvalidInput

_SCAN_EVERY = 0.3
_NOT_WATCHED = frozenset(("__pycache__", "node_modules", "site-packages"))
_Seen = dict[Path, tuple[int, int]]


def dev(
    app: AppName,
    watch: Annotated[
        list[Path] | None,
        typer.Option(
            "--watch", metavar="DIR", help="Watch this directory. Default: the current one.", show_default=False
        ),
    ] = None,
    lane: LaneWeights = None,
    concurrency: Concurrency = 20,
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="DURATION", help="How long running handlers may take to finish before a restart."
        ),
    ] = "5s",
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Where the server listens, without keys. Default: 127.0.0.1:8484, or a free port if that is taken.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--server/--no-server", help="Also serve the engine over HTTP.")] = True,
    log_level: LogLevel = "info",
    json: LogJson = False,
    dsn: Dsn = None,
) -> None:
    """Run a worker and a server for development, with the embedded database; both restart when code changes."""
    from flowfabric.worker.claims import lane_weights  # noqa: PLC0415

    places = [place.resolve() for place in watch or [Path.cwd()]]
    for place in places:
        if not place.is_dir():
            raise InvalidInput(f"no directory {place}", field="--watch", allowed="a directory")
    # Fail now for errors that no change of a file can repair.
    check_level(log_level)
    if lane:
        lane_weights(weights(lane))
    patience = parse_duration(grace, "--grace").total_seconds() + 5
    command = [sys.executable, "-m", "flowfabric.cli", "worker", app, f"--concurrency={concurrency}"]
    command += [f"--grace={grace}", f"--log-level={log_level}", f"--parent={os.getpid()}"]
    command += [f"--lane={one}" for one in lane or ()]
    command += ["--json"] * json + ["--dsn-of-environment"] * bool(dsn)
    commands = {"worker": command}
    where_to = ""
    if serve:
        where_to = _free_address(listen)
        made = [sys.executable, "-m", "flowfabric.cli", "server", f"--app={app}", f"--listen={where_to}", "--auth=none"]
        made += ["--no-duties", "--no-access-log", f"--grace={grace}", f"--log-level={log_level}"]
        made += ["--json"] * json + ["--dsn-of-environment"] * bool(dsn)
        commands["server"] = [*made, f"--parent={os.getpid()}"]
    # The password must not appear in the process list.
    environment = {**os.environ, **({"FLOWFABRIC_DSN": dsn} if dsn else {})}
    if where_to:
        environment.setdefault("FLOWFABRIC_PUBLIC_URL", f"http://{where_to}")  # links lead to the server
    with address(dsn) as chosen:
        where = "the embedded server" if is_embedded(dsn) else "the database of --dsn or FLOWFABRIC_DSN"
        if is_embedded(dsn):
            migrate_embedded(chosen)
        _note(f"using {where}; watching {', '.join(map(str, places))}; press Ctrl-C to end")
        if where_to:
            _note(f"the server is at http://{where_to}, for this machine alone and without keys")
        _Supervisor(commands, environment, places, patience).run()


def migrate_embedded(dsn: str) -> None:
    """Bring the embedded database up to date."""
    import asyncio  # noqa: PLC0415

    from flowfabric.engine.service import migrate_database  # noqa: PLC0415

    asyncio.run(migrate_database(dsn, unless_current=True))


def _note(text: str) -> None:
    _output.note(f"dev: {text}")


def _free_address(listen: str | None) -> str:
    """The address given; else the default one, with another port if that is taken."""
    from flowfabric.server.options import load_options  # noqa: PLC0415

    options = load_options({"listen": listen, "auth": "none"})
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((options.host, options.port))
        except OSError:
            if listen is not None:
                raise InvalidInput(f"cannot listen on {listen}", field="--listen", allowed="a free port") from None
            sock.bind((options.host, 0))
        port = sock.getsockname()[1]
    return f"[{options.host}]:{port}" if ":" in options.host else f"{options.host}:{port}"


class _Supervisor:
    """Keeps one worker and one server running on the current code."""

    def __init__(
        self, commands: dict[str, list[str]], environment: dict[str, str], places: list[Path], patience: float
    ) -> None:
        self._commands = commands
        self._environment = environment
        self._places = places
        self._patience = patience
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._signals = 0

    def run(self) -> None:
        before = {number: signal.signal(number, self._tell) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._run()
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, number: int, frame: object) -> None:
        self._signals += 1
        # The second signal goes to the processes again, which then stop immediately.
        if self._signals > 1:
            for process in list(self._running.values()):
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)

    def _run(self) -> None:
        seen = scan(self._places)
        self._start()
        said: set[str] = set()
        while not self._signals:
            time.sleep(_SCAN_EVERY)
            now = scan(self._places)
            if now != seen:
                changed = _changed(seen, now)
                # An editor or a checkout writes several files: wait until they are all there.
                while (later := scan(self._places)) != now:
                    now = later
                    time.sleep(_SCAN_EVERY / 3)
                seen = now
                _note(f"{changed} changed; restarting")
                self._stop()
                if not self._signals:
                    self._start()
                said.clear()
                continue
            for name, process in self._running.items():
                if name not in said and (code := process.poll()) is not None:
                    said.add(name)
                    _note(f"the {name} ended with {code}; waiting for a change")

    def _start(self) -> None:
        # In sessions of their own, so that Ctrl-C reaches only this process, which forwards it once.
        for name, command in self._commands.items():
            self._running[name] = subprocess.Popen(command, env=self._environment, start_new_session=True)

    def _stop(self) -> None:
        deadline = time.monotonic() + self._patience
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for name, process in self._running.items():
            while process.poll() is None:
                if time.monotonic() > deadline:
                    _note(f"the {name} did not stop in time; killing it")
                    process.kill()
                time.sleep(0.02)
        self._running.clear()


def scan(places: list[Path]) -> _Seen:
    """Every Python file below the directories, with its modification time and size."""
    found: _Seen = {}
    for place in places:
        for path in _files(str(place)):
            try:
                about = os.stat(path)
            except OSError:
                continue  # deleted meanwhile
            found[Path(path)] = (about.st_mtime_ns, about.st_size)
    return found


def _files(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in _NOT_WATCHED and not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if name.endswith(".py"))


def _changed(before: _Seen, now: _Seen) -> str:
    paths = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    shown = ", ".join(path.name for path in paths[:3])
    return f"{shown} and {len(paths) - 3} more" if len(paths) > 3 else shown
