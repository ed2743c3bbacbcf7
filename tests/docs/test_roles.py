"""The page about roles, followed word by word: users created, commands typed into one shell, output compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from flowfabric.embedded import server as embedded
from tests.docs.following import save, shell
from tests.docs.pages import ROOT, fences
from tests.integration.test_connection import as_user
from tests.support import in_database

PAGE = ROOT / "docs" / "guides" / "roles.md"
_ADDRESS = re.compile(r"postgresql://(\w+)@db\.example/app")


@pytest.fixture
def owners_database(on_one_server: dict[str, str], data_dir: Path) -> Iterator[str]:
    """The address of an empty database that belongs to app_owner, for the administrator."""
    server = embedded.start(data_dir)
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("drop schema flowfabric cascade")
        connection.execute("create role app_owner login")
        connection.execute("alter database flowfabric owner to app_owner")
    yield server.dsn
    with psycopg.connect(in_database(server.dsn, "postgres"), autocommit=True) as connection:
        connection.execute("drop database flowfabric with (force)")
        created = connection.execute("select rolname from pg_roles where rolname like 'app\\_%'").fetchall()
        for (role,) in created:
            connection.execute(f"drop role {role}".encode())
    server.release()


@pytest.mark.xdist_group("programs")
@pytest.mark.timeout(300)
def test_the_page_can_be_followed(on_one_server: dict[str, str], owners_database: str, tmp_path: Path) -> None:
    dsn = owners_database
    found = fences(PAGE)
    followed = 0
    with shell(tmp_path, on_one_server) as typing:
        for block, following in zip(found, [*found[1:], None], strict=True):
            where = f"{PAGE.name}:{block.line}"
            if block.language == "python":
                assert block.file is not None, where
                save(tmp_path, block, block.file)
            elif block.language == "sql":
                user = dsn if "create role" in block.code else as_user(dsn, "app_owner")
                with psycopg.connect(user, autocommit=True) as connection:
                    connection.execute(block.code.encode())
            elif block.language == "sh":
                code = _ADDRESS.sub(lambda found: shlex.quote(as_user(dsn, found[1])), block.code)
                typing.follow(code, following, where)
                followed += 1
    assert followed > 7
