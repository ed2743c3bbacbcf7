"""Several processes of one server: they share a listening socket, and otherwise nothing but Postgres.

This process binds the socket, starts the others, forwards signals, and starts a process again that died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import msgspec
from msgspec import Struct

from flowfabric.server.metrics_files import METRICS_DIRECTORY, forget_process
from flowfabric.server.options import Options

log = logging.getLogger("flowfabric.server")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_EVERY = 0.1
_AFTER_GRACE = 20.0  # seconds more than the grace before a process is killed
_PAUSES = (0.0, 1.0, 2.0, 5.0)  # seconds before a process is started again, if it dies soon
_SOON = 10.0


class Orders(Struct, frozen=True):
    """What a process of the server gets on its standard input, in one line; it stops at the end of the input."""

    options: Options
    dsn: str
    is_embedded: bool


class Child:
    """One process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.was_ready = False
        self.started_at = 0.0
        self.starts_at = 0.0  # when it is to be started again
        self.deaths = 0
        self._ready = -1

    def start(self, orders: bytes, sock: socket.socket, environment: dict[str, str]) -> None:
        ready, tells = os.pipe()
        os.set_blocking(ready, False)
        command = [sys.executable, "-m", "flowfabric.cli", "server", f"--socket={sock.fileno()}", f"--tells={tells}"]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                env=environment,
                pass_fds=(sock.fileno(), tells),
                start_new_session=True,  # Ctrl-C reaches only the parent, which forwards it once
            )
        finally:
            os.close(tells)
        assert self.process.stdin is not None
        self._ready = ready
        self.was_ready = False
        self.started_at = time.monotonic()
        with contextlib.suppress(OSError):  # it died at once, which the next check finds
            self.process.stdin.write(orders + b"\n")
            self.process.stdin.flush()

    def look(self) -> int | None:
        """The exit code, if it has exited."""
        assert self.process is not None
        if not self.was_ready:
            with contextlib.suppress(BlockingIOError):
                self.was_ready = os.read(self._ready, 1) == b"1"
        return self.process.poll()

    def tell(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def forget(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            os.close(self._ready)
            self.process = None


class Supervisor:
    """Keeps as many processes running as the options say."""

    def __init__(self, options: Options, dsn: str, sock: socket.socket, *, is_embedded: bool = False) -> None:
        self._options = options
        self._orders = msgspec.json.encode(Orders(options, dsn, is_embedded))
        self._sock = sock
        self._children = [Child(number) for number in range(options.processes)]
        self._signals: list[int] = []
        self._directory = ""

    def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._directory = tempfile.mkdtemp(prefix="flowfabric-metrics-")
        try:
            return self._run()
        finally:
            for child in self._children:
                child.tell(signal.SIGKILL)
                if child.process is not None:
                    child.process.wait()
                child.forget()
            shutil.rmtree(self._directory, ignore_errors=True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            for child in self._children:
                child.tell(signal.SIGKILL)
            shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(128 + number)

    def _run(self) -> int:
        environment = {**os.environ, METRICS_DIRECTORY: self._directory}
        for child in self._children:
            child.start(self._orders, self._sock, environment)
        while not self._signals:
            time.sleep(_LOOK_EVERY)
            for child in self._children:
                if child.process is None:
                    if time.monotonic() >= child.starts_at:
                        child.start(self._orders, self._sock, environment)
                elif (code := child.look()) is not None:
                    if not child.was_ready and not any(one.was_ready for one in self._children):
                        self._stop()
                        return code if code > 0 else 1  # it cannot start, and has said why
                    self._buried(child, code)
        return self._stop()

    def _buried(self, child: Child, code: int) -> None:
        assert child.process is not None
        is_soon = time.monotonic() - child.started_at < _SOON
        child.deaths = child.deaths + 1 if is_soon else 0
        pause = _PAUSES[min(child.deaths, len(_PAUSES) - 1)]
        child.starts_at = time.monotonic() + pause
        log.warning("process %d of the server ended with %d; it is started again", child.process.pid, code)
        forget_process(child.process.pid, self._directory)
        child.forget()

    def _stop(self) -> int:
        for child in self._children:
            child.tell(signal.SIGTERM)
        deadline = time.monotonic() + self._options.grace + _AFTER_GRACE
        codes: list[int] = []
        for child in self._children:
            if child.process is None:
                continue
            try:
                codes.append(child.process.wait(max(deadline - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                log.warning("process %d did not stop in time; killing it", child.process.pid)
                child.process.kill()
                codes.append(child.process.wait())
        return 0 if all(code == 0 for code in codes) else 1
