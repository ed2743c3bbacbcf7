"""API keys: who may call over HTTP, and with which scopes and namespaces."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_text

_KEY: Final = re.compile(r"ffk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_ID: Final = re.compile(r"[0-9a-f]{12}", re.ASCII)
_NO_DIGEST: Final = bytes(32)


class Scope(StrEnum):
    """A right of an API key. `admin` includes all; no other scope includes another."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"
    WORKER = "worker"
    ADMIN = "admin"


class ApiKeyText:
    """The key itself, `ffk_<id>_<secret>`. It prints redacted; `reveal` returns the text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def make(cls, key_id: str | None = None) -> ApiKeyText:
        """Return a new key, with 256 random bits; with an id, another secret of the same key."""
        return cls(f"ffk_{key_id or secrets.token_hex(6)}_{secrets.token_urlsafe(32)}")

    def reveal(self) -> str:
        """Return the key itself, only for the person or program that will use it."""
        return self._text

    @property
    def key_id(self) -> str:
        """The part that is not secret."""
        return self._text.split("_", 2)[1]

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret."""
        return hashlib.sha256(self._text.split("_", 2)[2].encode()).digest()

    def __str__(self) -> str:
        return f"ffk_{self.key_id}_<REDACTED>"

    def __repr__(self) -> str:
        return f"ApiKeyText({self})"


def parse_api_key(text: object) -> ApiKeyText | None:
    """Read a key; None if the text cannot be one."""
    return ApiKeyText(text) if isinstance(text, str) and _KEY.fullmatch(text) else None


class ApiKey(Struct, frozen=True, kw_only=True):
    """An API key without its secret. `namespaces` are the only ones it reaches; None: all.

    With `hides_payloads` responses contain no inputs, results, steps, frames or tracebacks.
    """

    key_id: str
    name: str
    scopes: tuple[Scope, ...]
    namespaces: tuple[str, ...] | None = None
    hides_payloads: bool = False
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


class CreatedApiKey(Struct, frozen=True, kw_only=True):
    """A new key, or one with a new secret: the only time that `key` is shown."""

    key_id: str
    name: str
    key: ApiKeyText


class StoredApiKey(Struct, frozen=True, kw_only=True):
    """The result of looking up the id of a key: a key or nothing, and the digests that its secret may have."""

    api_key: ApiKey | None
    is_usable: bool
    digests: tuple[bytes, bytes]
    read_at: datetime

    def accepts(self, key: ApiKeyText) -> bool:
        """Whether the key works. The work is the same for every key, known or not."""
        given = key.digest
        fits = [hmac.compare_digest(given, digest) for digest in self.digests]
        return self.is_usable & (fits[0] | fits[1])

    def __repr__(self) -> str:
        return f"StoredApiKey({self.api_key!r})"


def stored_digests(digest: bytes | None, old: bytes | None) -> tuple[bytes, bytes]:
    """Return two digests to compare with. A missing one is replaced by one that no secret has."""
    return digest or _NO_DIGEST, old or _NO_DIGEST


def check_key_id(value: object, field: str = "key_id") -> str:
    """The id of a key: 12 hexadecimal digits."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise InvalidInput("not the id of an API key", field=field, allowed="12 hexadecimal digits, as in ffk_<id>_...")
    return value


def check_scopes(value: Any, field: str = "scopes") -> list[str]:
    """Scopes, each once, in the order in which they are defined."""
    allowed = f"some of {', '.join(Scope)}"
    if isinstance(value, str | bytes) or not isinstance(value, list | tuple | set | frozenset) or not value:
        raise InvalidInput(f"got {value!r}", field=field, allowed=allowed)
    known = set(Scope)
    if unknown := [one for one in value if not isinstance(one, str) or one not in known]:
        raise InvalidInput(f"got {unknown[0]!r}", field=field, allowed=allowed)
    return [scope.value for scope in Scope if scope in value]


def check_namespaces(value: Any, field: str = "namespaces") -> list[str] | None:
    """Namespaces, sorted, each once; None: all of them."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, list | tuple | set | frozenset) or not value:
        raise InvalidInput(f"got {value!r}", field=field, allowed="a list of at least one namespace, or None for all")
    if len(value) > 100:
        raise InvalidInput(f"{len(value)} namespaces", field=field, allowed="at most 100")
    return sorted({check_text(one, field) for one in value})
