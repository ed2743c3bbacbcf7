"""The keys that sign waitpoint tokens: seed, rotate, list. No call ever returns a secret."""

from __future__ import annotations

import re
from datetime import timedelta

from flowfabric._postgres import statements
from flowfabric.engine.base import Operations
from flowfabric.errors import Conflict, InvalidInput, ValidationFailed
from flowfabric.values.keystore import (
    AlreadySeeded,
    Rotated,
    Rotation,
    RotationNoop,
    Seeded,
    VerifyingKid,
    WaitpointKids,
)

GRACE = timedelta(days=1)
_KID = re.compile(r"[!-9;-~]{1,64}")
_SECRET = re.compile(r"[0-9a-fA-F]{64}")
_MAX_GRACE_MS = 2**53 - 1


class Keys(Operations):
    """seed_waitpoint_hmac_secret, rotate_waitpoint_hmac_secret_all, list_waitpoint_hmac_kids."""

    async def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
        """Install the first key; never replaces one. Migrating already installs one."""
        name, secret = _kid(kid, "kid"), _secret(secret_hex)
        row = await self._row(statements.SEED_SECRET, name, secret, repeatable=True)
        if row["code"] == "other_kid":
            raise InvalidInput(
                f"{row['detail'] or 'another key'} is already installed; use rotate_waitpoint_hmac_secret_all",
                field="kid",
            )
        return Seeded(name) if row["code"] == "seeded" else AlreadySeeded(name, row["detail"] == "true")

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace: timedelta = GRACE
    ) -> list[Rotation]:
        """Sign with a new key from now on. Tokens signed with the old key stay valid for `grace`.

        There is one keystore for all partitions, so the list has one entry; a conflict is inside it.
        """
        name, secret, ms = _kid(new_kid, "new_kid"), _secret(new_secret_hex), _grace(grace)
        row = await self._row(statements.ROTATE_SECRET, name, secret, ms, repeatable=True)
        match row["code"]:
            case "rotated":
                return [Rotation(0, Rotated(row["detail"], name, row["purged"]))]
            case "noop":
                return [Rotation(0, RotationNoop(name))]
            case _:
                return [Rotation(0, Conflict("rotation_conflict", f"kid {name} was used before"))]

    async def list_waitpoint_hmac_kids(self) -> WaitpointKids:
        """Return the key that signs, and the others that still verify, by when they stop."""
        found = await self._fetch(statements.LIST_KIDS, repeatable=True)
        return WaitpointKids(
            next((row["kid"] for row in found if row["state"] == "current"), None),
            tuple(VerifyingKid(row["kid"], row["expires_at"]) for row in found if row["state"] == "verifying"),
        )


def _kid(value: object, field: str) -> str:
    if not isinstance(value, str) or not _KID.fullmatch(value):
        raise ValidationFailed("invalid_kid", f"{field}: 1 to 64 printable ASCII characters, no colon, no space")
    return value


def _secret(value: object) -> bytes:
    if not isinstance(value, str) or not _SECRET.fullmatch(value):
        raise ValidationFailed("invalid_secret_hex", "exactly 64 hexadecimal characters are needed")
    return bytes.fromhex(value)


def _grace(value: object) -> int:
    if isinstance(value, timedelta):
        ms = value // timedelta(milliseconds=1)
        if 0 <= ms <= _MAX_GRACE_MS:
            return ms
    raise ValidationFailed("invalid_grace_ms", "grace: a timedelta from 0 to 2^53 - 1 milliseconds")
