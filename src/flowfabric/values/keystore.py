"""The keys that sign the tokens of waitpoints: results of the operations on them."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from flowfabric.errors import Conflict


class Seeded(Struct, frozen=True):
    kid: str


class AlreadySeeded(Struct, frozen=True):
    kid: str
    same_secret: bool


class Rotated(Struct, frozen=True):
    previous_kid: str | None
    new_kid: str
    gc_count: int


class RotationNoop(Struct, frozen=True):
    kid: str


class Rotation(Struct, frozen=True):
    """The outcome of a rotation; there is one keystore, so there is one entry, for partition 0."""

    partition: int
    result: Rotated | RotationNoop | Conflict


class VerifyingKid(Struct, frozen=True):
    kid: str
    expires_at: datetime


class WaitpointKids(Struct, frozen=True):
    """Which keys sign and verify tokens."""

    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]
