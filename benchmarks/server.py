"""The Postgres the measurements run on: one server, a fresh database for every contestant and repetition."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from benchmarks.product import embedded

# Durability is on, as in production. The write-ahead log is large enough that no
# checkpoint falls into one contestant's turn and not into another's.
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "max_connections": "1000",
}
_SHOWN = ("server_version", *SETTINGS, "wal_compression", "full_page_writes", "autovacuum")


@dataclass(frozen=True)
class Server:
    """Where the databases are made. The DSN must belong to a superuser."""

    dsn: str

    def database_dsn(self, name: str) -> str:
        return urlunsplit(urlsplit(self.dsn)._replace(path=f"/{name}"))

    async def create_database(self, name: str) -> str:
        """An empty database of that name, in place of any older one. Returns its DSN."""
        await self.drop_database(name)
        async with self.connect() as admin:
            await admin.execute(f'create database "{name}"')
        return self.database_dsn(name)

    async def drop_database(self, name: str) -> None:
        async with self.connect() as admin:
            await admin.execute(f'drop database if exists "{name}" with (force)')

    async def settle(self) -> None:
        """Write out what earlier work left dirty, so that the next measurement does not pay for it."""
        async with self.connect() as admin:
            await admin.execute("checkpoint")

    async def settings(self) -> dict[str, str]:
        async with self.connect() as admin:
            return {name: await admin.fetchval("select current_setting($1)", name) for name in _SHOWN}

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self.dsn)
        try:
            yield connection
        finally:
            await connection.close()


@contextlib.contextmanager
def running_server(dsn: str | None = None) -> Iterator[Server]:
    """The server behind `dsn`, or one of our own with `SETTINGS` in a directory that goes away again."""
    if dsn is not None:
        yield Server(dsn)
        return
    with tempfile.TemporaryDirectory(prefix="flowfabric-bench-", ignore_cleanup_errors=True) as directory:
        data_dir = Path(directory)
        # The account the server runs as must be able to enter it.
        data_dir.chmod(0o755)
        server = embedded.start(data_dir, settings=SETTINGS)
        try:
            yield Server(server.dsn)
        finally:
            server.release()
            embedded.stop(data_dir)
            _wait_until_gone(data_dir / "socket")


def _wait_until_gone(link: Path) -> None:
    """The server's watcher tidies up last; it must find the data directory still there."""
    deadline = time.monotonic() + 10
    while link.is_symlink() and time.monotonic() < deadline:
        time.sleep(0.05)
