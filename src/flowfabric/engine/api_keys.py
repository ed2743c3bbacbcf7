"""API keys: who may call over HTTP. The keys that sign tokens are in `keys`."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from flowfabric._postgres import rows, statements
from flowfabric._postgres.refusals import refusal
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.checks import check_duration, check_filled, check_limit
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.values.api_key import (
    ApiKey,
    ApiKeyText,
    CreatedApiKey,
    Scope,
    StoredApiKey,
    check_key_id,
    check_namespaces,
    check_scopes,
    parse_api_key,
)
from flowfabric.values.checks import check_text, moment
from flowfabric.values.page import Page


class ApiKeys(Operations):
    """create_api_key, list_api_keys, rotate_api_key, revoke_api_key, verify_api_key."""

    async def create_api_key(
        self,
        name: str,
        scopes: Collection[Scope | str],
        *,
        namespaces: Collection[str] | None = None,
        hides_payloads: bool = False,
        expires: datetime | timedelta | None = None,
    ) -> CreatedApiKey:
        """Create an API key. Only this call ever returns its secret: the database stores a digest.

        `name` says who it is in the audit log and in approvals; two keys that are not revoked cannot share one.
        `namespaces`: the only ones it reaches; None: all. `expires`: when it stops working, or after how long.
        """
        called, wanted = _name(name), check_scopes(scopes)
        only = check_namespaces(namespaces)
        at = moment(expires, "expires") if isinstance(expires, datetime) else None
        ms = None if expires is None or at is not None else check_duration(expires, "expires")
        if not isinstance(hides_payloads, bool):
            raise InvalidInput(f"got {hides_payloads!r}", field="hides_payloads", allowed="true or false")
        key = ApiKeyText.make()
        row = await self._row(
            statements.CREATE_API_KEY, key.key_id, called, key.digest, wanted, only, hides_payloads, at, ms
        )
        if row["code"] != "ok":
            raise refusal(row["code"], f"there is a key named {called!r}; revoke it first, or rotate it")
        return CreatedApiKey(key_id=key.key_id, name=called, key=key)

    async def list_api_keys(
        self, *, usable: bool = False, cursor: tuple[datetime, str] | None = None, limit: int = 100
    ) -> Page[ApiKey, tuple[datetime, str]]:
        """Return API keys, newest first; never their secrets. `usable`: only those that work now."""
        size = check_limit(limit, 1000)
        after = _cursor(cursor)
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_API_KEYS, bool(usable), *after, size + 1, repeatable=True)
        return first_page([rows.api_key(row) for row in found], size, lambda last: (last.created_at, last.key_id))

    async def revoke_api_key(self, key_id: str) -> None:
        """Make a key stop working for good: on every server within 5 seconds."""
        row = await self._row(statements.REVOKE_API_KEY, check_key_id(key_id), repeatable=True)
        if not row["found"]:
            raise NotFound("API key", key_id)

    async def rotate_api_key(self, key_id: str, *, grace: timedelta = timedelta(0)) -> CreatedApiKey:
        """Give a key another secret; id, name and rights stay. The previous secret works for another `grace`."""
        key = ApiKeyText.make(check_key_id(key_id))
        row = await self._row(statements.ROTATE_API_KEY, key_id, key.digest, check_duration(grace, "grace", least_ms=0))
        match row["code"]:
            case "ok":
                return CreatedApiKey(key_id=key_id, name=row["name"], key=key)
            case "not_found":
                raise NotFound("API key", key_id)
            case code:
                raise refusal(code, f"key {key_id} was revoked; create another")

    async def read_api_key(self, key_id: str) -> StoredApiKey:
        """Look up the id of a key, even one that no key has, so that both cases take the same work."""
        row = await self._row(statements.READ_API_KEY, check_key_id(key_id), repeatable=True)
        return rows.stored_api_key(row)

    async def verify_api_key(self, key: str) -> ApiKey | None:
        """Return the API key with this text; None if there is none, or if it was revoked or has expired."""
        given = parse_api_key(key)
        if given is None:
            return None
        stored = await self.read_api_key(given.key_id)
        return stored.api_key if stored.accepts(given) else None

    async def note_api_key_use(self, key_id: str) -> datetime:
        """Remember that a key was used now; writes at most once a minute. Returns the time."""
        row = await self._row(statements.NOTE_API_KEY_USE, check_key_id(key_id), repeatable=True)
        at: datetime = row["at"]
        return at


def _name(value: object) -> str:
    name = check_filled(value, "name")
    if not name.isprintable():
        raise InvalidInput("contains a control character", field="name", allowed="1 to 256 bytes of printable text")
    return name


def _cursor(value: object) -> tuple[datetime | None, str | None]:
    if value is None:
        return None, None
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], datetime):
        raise InvalidInput(f"got {type(value).__name__}", field="cursor", allowed="a next_cursor of this list")
    return moment(value[0], "cursor"), check_text(value[1], "cursor")
