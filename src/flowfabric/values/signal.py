"""Signals as handlers see them, and as they are recorded."""

from __future__ import annotations

from datetime import datetime
from typing import Generic, TypeVar
from uuid import UUID

from msgspec import Struct


class ReceivedSignal(Struct, frozen=True, kw_only=True):
    """A signal that was accepted."""

    signal_id: UUID
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: datetime
    payload: bytes | None
    payload_encoding: str
    waitpoint_key: str


class RecordedSignal(ReceivedSignal, frozen=True, kw_only=True):
    """A signal and its effect, as `read_signals` lists it. `refused` is why a worker set it aside, if one did."""

    ordinal: int
    waitpoint_id: UUID
    suspension_id: UUID | None
    target_scope: str
    created_at: datetime
    observed_effect: str
    match_detail: str
    refused: str | None = None


class Accepted(Struct, frozen=True):
    """The signal is recorded. `effect` says whether it resumed the execution."""

    signal_id: UUID
    effect: str
    match_detail: str


class Unchecked(Struct, frozen=True):
    """Nothing is recorded yet: the payload has to fit this JSON schema. Check it and deliver again."""

    schema: str


class DuplicateSignal(Struct, frozen=True):
    """The same signal was accepted before; nothing changed.

    `refused`: why that one was set aside. It counts for nothing; answer again with another id.
    """

    existing_signal_id: UUID
    refused: str | None = None


P = TypeVar("P")


class Signal(Struct, Generic[P], frozen=True, kw_only=True):
    """A signal that a handler waited for."""

    name: str
    payload: P
    key: str
    signal_id: UUID
    category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: datetime
