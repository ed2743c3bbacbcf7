"""PgBouncer in transaction mode, in front of the database of a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

import pytest

_PORT = 6432  # in the name of a socket in a folder of its own


@contextlib.contextmanager
def pooled(dsn: str) -> Iterator[str]:
    """The DSN of a PgBouncer in transaction mode, with fewer connections than its clients have."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("no pgbouncer here")
    parts = urlsplit(dsn)
    (host,) = parse_qs(parts.query)["host"]
    place = Path(tempfile.mkdtemp(prefix="ff-bouncer-", dir="/tmp"))
    owner = Path(host).stat()
    (place / "users.txt").write_text(f'"{parts.username}" ""\n')
    (place / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={host} port=5432 user={parts.username}\n"
        f"[pgbouncer]\nlisten_addr =\nlisten_port = {_PORT}\nunix_socket_dir = {place}\n"
        f"auth_type = trust\nauth_file = {place}/users.txt\npool_mode = transaction\ndefault_pool_size = 3\n"
        f"logfile = {place}/log\n"
    )
    for path in (place, *place.iterdir()):
        os.chown(path, owner.st_uid, owner.st_gid)
    process = subprocess.Popen(
        [program, "-q", str(place / "pgbouncer.ini")],
        user=owner.st_uid,
        group=owner.st_gid,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            assert process.poll() is None, (place / "log").read_text()
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"{place}/.s.PGSQL.{_PORT}")
                break
            time.sleep(0.01)
        yield urlunsplit(parts._replace(query=f"host={place}&port={_PORT}"))
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(place)
