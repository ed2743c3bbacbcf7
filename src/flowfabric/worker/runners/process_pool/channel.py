"""Messages between the parent and a child: bytes over a socket, and pickles in them."""

from __future__ import annotations

import contextlib
import io
import pickle
import select
import socket
import struct
from typing import Any, Final

from flowfabric.worker.runners.process_pool.main_module import MAIN_IN_CHILD, load_main

_LENGTH: Final = struct.Struct("!Q")
_CHUNK: Final = 1 << 20


class Channel:
    """Messages over a socket, until the other side closes it or dies.

    A process that the other side forked may hold the socket open after its death; the `pidfd` reports the death.
    """

    def __init__(self, sock: socket.socket, pidfd: int | None = None) -> None:
        self._socket = sock
        self._pidfd = pidfd
        sock.setblocking(False)

    def send(self, message: bytes) -> None:
        for part in (_LENGTH.pack(len(message)), message):
            rest = memoryview(part)
            while rest:
                self._wait(select.POLLOUT)
                with contextlib.suppress(BlockingIOError):
                    rest = rest[self._socket.send(rest[:_CHUNK]) :]

    def receive(self) -> bytes:
        """Return the next message. Raises EOFError, or an OSError, if there will be none."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        read = bytearray()
        while len(read) < length:
            self._wait(select.POLLIN)
            with contextlib.suppress(BlockingIOError):
                part = self._socket.recv(min(length - len(read), _CHUNK))
                if not part:
                    raise EOFError
                read += part
        return bytes(read)

    def _wait(self, event: int) -> None:
        poll = self._poll(event)
        # Messages written before a death are still read.
        if not any(fd == self._socket.fileno() for fd, _ in poll.poll()):
            raise EOFError

    def _poll(self, event: int) -> select.poll:
        poll = select.poll()
        poll.register(self._socket, event)
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        return poll

    @property
    def is_open(self) -> bool:
        """Whether the other side is alive. For a side that expects no message now."""
        return not self._poll(select.POLLIN).poll(0)

    def wait_for_end(self) -> None:
        """Return when the other side has closed the socket or has died; messages are ignored."""
        poll = self._poll(0)
        while not poll.poll():
            pass

    def close(self) -> None:
        self._socket.close()


class _Unpickler(pickle.Unpickler):
    """Maps the two names of the parent's script, one in each process."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", MAIN_IN_CHILD):
            load_main()
            module = "__main__"
        return super().find_class(module, name)


def dumps(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def loads(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()
