"""Locks that the kernel drops with the last process that holds them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class Lock:
    """A flock on its own open file. Forked children close the file without unlocking it for their parent."""

    _open: set[Lock] = set()  # noqa: RUF012 - shared by all instances on purpose

    def __init__(self, path: Path, operation: int, *, create: bool = True) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
        self._open.add(self)
        try:
            fcntl.flock(self.fd, operation)
        except BaseException:
            self.close()
            raise

    def is_on(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.fd), path.stat())
        return False

    def close(self) -> None:
        if self in self._open:
            self._open.discard(self)
            os.close(self.fd)

    @classmethod
    def close_all(cls) -> None:
        for lock in tuple(cls._open):
            lock.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def would_wait(path: Path, operation: int) -> bool:
    """Whether the lock is held. Use LOCK_SH to ask for an exclusive lock, LOCK_EX for a shared one."""
    try:
        Lock(path, operation | fcntl.LOCK_NB, create=False).close()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
