"""Commands for API keys."""

from __future__ import annotations

import pytest

import flowfabric as ff
from flowfabric.values.api_key import Scope
from tests.integration.test_cli import call
from tests.kept import *  # noqa: F403 - its fixtures
from tests.support import Clock

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_key_is_printed_once_and_works(plain_engine: ff.Engine, database: str, clock: Clock) -> None:
    said = await call(
        "api-keys", "create", "ci", "--scope", "read", "-s", "submit", "-n", "a", "-n", "b", "--hide-payloads",
        "--expires", "90d", dsn=database,
    )  # fmt: skip
    key = said.out.strip()
    assert "not shown again" in said.err and key not in said.err
    found = await plain_engine.verify_api_key(key)
    assert found is not None
    assert (found.name, found.scopes, found.namespaces) == ("ci", (Scope.READ, Scope.SUBMIT), ("a", "b"))
    assert found.hides_payloads and found.expires_at is not None
    listed = await call("api-keys", "ls", dsn=database)
    assert "ci" in listed.out and "hidden" in listed.out and key not in listed.out
    assert (await call("api-keys", dsn=database)).out == listed.out
    (one,) = (await call("api-keys", "ls", "--json", dsn=database)).json["items"]
    assert (one["name"], one["scopes"], one["namespaces"]) == ("ci", ["read", "submit"], ["a", "b"])
    await clock.advance(days=91)
    assert "there is no API key" in (await call("api-keys", "ls", dsn=database)).err
    assert "expired" in (await call("api-keys", "ls", "--all", dsn=database)).out


async def test_a_key_is_rotated_and_revoked_by_name_or_id(plain_engine: ff.Engine, database: str) -> None:
    first = (await call("api-keys", "create", "ci", "--scope", "admin", "--json", dsn=database)).json
    second = await call("api-keys", "rotate", "ci", "--yes", dsn=database)
    for key in (first["key"], second.out.strip()):
        assert await plain_engine.verify_api_key(key)
    third = (await call("api-keys", "rotate", first["key_id"], "--grace", "0", "--yes", "--json", dsn=database)).json
    assert third["key_id"] == first["key_id"]
    assert await plain_engine.verify_api_key(second.out.strip()) is None
    assert await plain_engine.verify_api_key(third["key"])
    revoked = await call("api-keys", "revoke", "ci", "--yes", dsn=database)
    assert "is revoked" in revoked.out
    assert await plain_engine.verify_api_key(third["key"]) is None
    assert "revoked" in (await call("api-keys", "ls", "--all", dsn=database)).out
    again = await call("api-keys", "create", "ci", "--scope", "read", dsn=database)
    assert await plain_engine.verify_api_key(again.out.strip())


async def test_bad_arguments_are_refused_by_name(database: str) -> None:
    for given, code, words in (
        (("create", "ci"), 2, "--scope"),
        (("create", "ci", "--scope", "all"), 2, "--scope"),
        (("create", "ci", "--scope", "read", "--expires", "soon"), 2, "--expires"),
        (("create", "", "--scope", "read"), 2, "name"),
        (("revoke", "nobody", "--yes"), 1, "nobody"),
        (("rotate", "nobody", "--yes"), 1, "nobody"),
        (("rotate", "nobody", "--grace", "x", "--yes"), 2, "--grace"),
    ):
        said = await call("api-keys", *given, dsn=database, code=code)
        assert words in said.err, said
