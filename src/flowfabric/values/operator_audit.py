"""The audit log: what operators did over HTTP."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One operation that an operator asked for. `outcome` is `ok`, or the code of the refusal.

    `actor` is the name of the API key; `key_id` is None for a decision by link.
    """

    seq: int
    at: datetime
    actor: str
    key_id: str | None
    address: str | None
    operation: str
    target: str | None
    outcome: str
    request_id: str | None


class AuditFilter(Struct, frozen=True, kw_only=True):
    """Restricts the audit log: every field that is set must match exactly; `at` lies in [`since`, `until`)."""

    actor: str | None = None
    key_id: str | None = None
    operation: str | None = None
    target: str | None = None
    outcome: str | None = None
    since: datetime | None = None
    until: datetime | None = None
