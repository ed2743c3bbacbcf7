"""Quotas: rates and caps, how full they are, and what an admission returns."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, TypeAlias
from uuid import UUID, uuid5

from msgspec import Struct, field

from flowfabric.values.ids import QuotaPolicyId

DEFAULT_WINDOW: Final = timedelta(seconds=60)
MAX_QUOTA: Final = 10**9
MAX_WINDOW: Final = timedelta(days=366)
MAX_JITTER: Final = timedelta(days=1)
DEFAULT_KEY: Final = "default"
_NAMES: Final = UUID("b1a5b6f2-6a0e-5d0c-8f5e-2c7d4f1a9e03")


def quota_policy_id_of(name: str) -> QuotaPolicyId:
    """Return the id of the quota policy that was created with this name and without an id."""
    return QuotaPolicyId(uuid5(_NAMES, name))


class QuotaPolicyCreated(Struct, frozen=True):
    quota_policy_id: QuotaPolicyId


class QuotaPolicyExists(Struct, frozen=True):
    """The policy existed; nothing changed, even if its numbers differ."""

    quota_policy_id: QuotaPolicyId


class QuotaLimits(Struct, frozen=True, kw_only=True):
    """The numbers of a policy; 0: no such limit. A window of 0 is one of 60 seconds."""

    max_requests_per_window: int
    requests_per_window_seconds: int
    active_concurrency_cap: int
    jitter_ms: int = field(name="jitter_seconds")  # in JSON the property of that name

    @property
    def jitter_seconds(self) -> float:
        """The same in seconds."""
        return self.jitter_ms / 1000


class QuotaPolicy(Struct, frozen=True, kw_only=True):
    """A policy, and how full it is over all values of its key.

    `active` slots are held, `admitted` executions started within the window, `waiting` executions are held back
    (counted up to 10,000). `next_free_at`: when the first window that is full has room again.
    """

    quota_policy_id: QuotaPolicyId
    name: str | None
    key: str | None
    limits: QuotaLimits
    created_at: datetime
    updated_at: datetime
    active: int
    admitted: int
    waiting: int
    next_free_at: datetime | None


class QuotaKey(Struct, frozen=True, kw_only=True):
    """The numbers of `QuotaPolicy` for one value of the key."""

    key: str
    active: int
    admitted: int
    waiting: int
    next_free_at: datetime | None


class Admitted(Struct, frozen=True):
    """The execution has a slot."""


class AlreadyAdmitted(Struct, frozen=True):
    """The execution had a slot already; nothing changed."""


class RateExceeded(Struct, frozen=True):
    """The window is full."""

    retry_after: timedelta


class ConcurrencyExceeded(Struct, frozen=True):
    """All slots are held."""


class Released(Struct, frozen=True):
    """The execution has no slot."""


AdmissionAnswer: TypeAlias = Admitted | AlreadyAdmitted | RateExceeded | ConcurrencyExceeded


class QuotaPlace(Struct, frozen=True):
    """Where a page of the quota reconciler ended: the policy, its key, and the last slot of a long one (None: all)."""

    policy: UUID
    key: str
    number: int | None = None


class QuotaRound(Struct, frozen=True, kw_only=True):
    """One page of the quota reconciler: what it removed, and where it ended (None: it was the last page)."""

    entries: int
    slots: int
    heads: int
    last: QuotaPlace | None


class UnblockRound(Struct, frozen=True, kw_only=True):
    """One page of the duty `unblock`: how many executions became claimable, how many limits were checked, or failed."""

    promoted: int
    looked: int
    failed: int = 0
    message: str | None = None
    last: tuple[UUID, str] | None
