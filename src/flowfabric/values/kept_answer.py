"""Answers kept for repeats of a request with an idempotency key."""

from __future__ import annotations

from enum import StrEnum
from uuid import UUID

from msgspec import Struct


class Repeat(StrEnum):
    """Whether a request with an idempotency key is new or a repeat."""

    NEW = "new"
    UNDER_WAY = "under_way"  # the same request is being worked on
    OTHER_REQUEST = "other_request"  # the key was used for another request
    DONE = "done"  # it has a response


class AnswerKey(Struct, frozen=True, kw_only=True):
    """An idempotency key with its scope: the API key (empty: none) and the operation. `holder` is this request."""

    key_id: str
    operation: str
    idempotency_key: str
    holder: UUID


class KeptAnswer(Struct, frozen=True, kw_only=True):
    """The response to an earlier request, if `repeat` is `done`. Without `status` it had a secret and was not kept."""

    repeat: Repeat
    status: int | None = None
    headers: dict[str, str] = {}
    body: bytes = b""
