"""Servers that really were restored or took over: which cursors of the event log continue there."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

import flowfabric as ff
from flowfabric.embedded import server as embedded
from flowfabric.engine.service import migrate_database
from flowfabric.errors import CursorRefused
from flowfabric.values.event import EventCursor
from tests.conftest import new_database  # noqa: F401 - a fixture
from tests.places import place_of_data
from tests.support import in_database, started

SETTINGS = {"fsync": "off", "full_page_writes": "off", "wal_level": "replica", "restore_command": "false"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    place = place_of_data(tmp_path) / "restored"
    yield place
    embedded.stop(place)
    shutil.rmtree(place, ignore_errors=True)


async def write(dsn: str, events: int) -> EventCursor:
    """Write events; returns the cursor of a reader that has read them."""
    async with await ff.Engine.connect(dsn, notifications=False) as engine:
        for _ in range(events):
            await started(engine)
        cursor = (await engine.read_events(limit=1000)).next_cursor
        assert cursor is not None
        return cursor


def start(place: Path) -> str:
    return embedded.start(place, settings=SETTINGS).dsn


def crash(place: Path) -> None:
    """Stop the server without a checkpoint: the next start reads the log of the server, where sequences are ahead."""
    os.kill(int((place / "pgdata" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
    embedded.stop(place)


@pytest.mark.parametrize("lost", [0, 5, 40])
async def test_a_server_that_took_over_refuses_cursors_of_events_it_lost(place: Path, lost: int) -> None:
    dsn = start(place)
    await migrate_database(dsn)
    kept = await write(dsn, 3)
    crash(place)
    shutil.copytree(place / "pgdata", place / "copy")
    last = await write(start(place), lost)
    embedded.stop(place)

    shutil.rmtree(place / "pgdata")
    os.rename(place / "copy", place / "pgdata")
    (place / "pgdata" / "recovery.signal").touch()  # it recovers like a standby that is promoted: on a new timeline
    dsn = start(place)
    sql = await asyncpg.connect(dsn)
    while await sql.fetchval("select pg_is_in_recovery()"):
        await asyncio.sleep(0.01)
    assert await sql.fetchval("select pg_walfile_name(pg_current_wal_insert_lsn())") > "00000002"
    new = await write(dsn, 60)
    assert new.epoch > 0 and new.position > last.position
    assert await sql.fetchval("select last_position from flowfabric.log_epoch where epoch = 0") == kept.position
    await sql.close()

    async with await ff.Engine.connect(dsn, notifications=False) as engine:
        assert len((await engine.read_events(after=kept)).items) == 60
        if lost:
            with pytest.raises(CursorRefused) as refused:
                await engine.read_events(after=last)
            error = refused.value
            assert (error.kind, error.position, error.epoch) == ("cursor_ahead", kept.position, new.epoch)
        assert await engine.audit(events=True) == []


async def test_a_crash_begins_no_epoch(place: Path) -> None:
    dsn = start(place)
    await migrate_database(dsn)
    before = await write(dsn, 3)
    crash(place)
    dsn = start(place)
    assert (await write(dsn, 3)).epoch == 0
    async with await ff.Engine.connect(dsn, notifications=False) as engine:
        assert len((await engine.read_events(after=before)).items) == 3


async def test_a_dump_restored_on_the_same_server_begins_an_epoch(server: str, database: str) -> None:
    kept = await write(database, 3)
    programs = embedded.program("pg_dump").parent
    dump = subprocess.run([programs / "pg_dump", database], check=True, capture_output=True).stdout
    lost = await write(database, 3)
    admin = await asyncpg.connect(server)
    await admin.execute("create database ff_restored")
    dsn = in_database(server, "ff_restored")
    try:
        subprocess.run([programs / "psql", "-q", "-v", "ON_ERROR_STOP=1", dsn], input=dump, check=True)
        async with await ff.Engine.connect(dsn, notifications=False) as engine:
            assert (await engine.read_events(after=kept)).items == []
            with pytest.raises(CursorRefused) as refused:
                await engine.read_events(after=lost)
            assert refused.value.position == kept.position
            assert (await write(dsn, 6)).epoch == refused.value.epoch > 0
            with pytest.raises(CursorRefused):
                await engine.read_events(after=lost)
    finally:
        await admin.execute("drop database ff_restored with (force)")
        await admin.close()
