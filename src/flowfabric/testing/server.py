"""The server of the tests: started once per test run and shared by its processes, or a server that the user names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flowfabric._postgres.scratch import Databases
from flowfabric.client.portal import Portal
from flowfabric.errors import ConnectionFailed

# Fast and not durable: the data is thrown away after the tests.
_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "128MB",
}


class Server:
    """Provides databases on one server: the embedded one, with its data in `place`, or the one that `dsn` names."""

    def __init__(self, place: Path, dsn: str | None = None) -> None:
        self._embedded: Any = None
        self._next: asyncio.Task[str] | None = None
        self._dropping: asyncio.Task[None] | None = None
        if dsn is None:
            self._embedded = _start(place)
        # In its own thread: a fixture may be used while the test's event loop runs.
        self._portal = Portal()
        try:
            self._databases = self._portal.call(
                Databases.open(dsn or self._embedded.dsn, "file_copy" if dsn is None else "wal_log")
            )
        except BaseException:
            self._portal.close()
            self._release()
            raise

    @contextmanager
    def database(self) -> Iterator[str]:
        """The DSN of a fresh, migrated database, which is dropped afterwards even if clients are still connected."""
        dsn = self._portal.call(self._take())
        try:
            yield dsn
        finally:
            self._portal.call(self._give_back(dsn))

    async def _take(self) -> str:
        # While a test runs, the next database is created and the previous one dropped.
        ready = self._next or asyncio.create_task(self._databases.create())
        self._next = None
        dsn = await ready
        self._next = asyncio.create_task(self._databases.create())
        return dsn

    async def _give_back(self, dsn: str) -> None:
        if self._dropping is not None:
            await self._dropping
        self._dropping = asyncio.create_task(self._databases.drop(dsn))

    async def _finish(self) -> None:
        try:
            if self._dropping is not None:
                await self._dropping
            if self._next is not None:
                await self._databases.drop(await self._next)
        finally:
            await self._databases.close()

    def close(self) -> None:
        """Disconnect. The embedded server stops when the last process of the test run has left."""
        try:
            self._portal.call(self._finish())
        finally:
            self._portal.close()
            self._release()

    def _release(self) -> None:
        if self._embedded is not None:
            self._embedded.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(place: Path) -> Any:
    try:
        from flowfabric.embedded import server as embedded  # noqa: PLC0415 - not importable on every platform
    except ImportError as error:
        raise ConnectionFailed(
            "unreachable", f"no embedded server on this platform ({error}); set FLOWFABRIC_TEST_DSN"
        ) from error
    return embedded.start(place, settings=_SETTINGS)
