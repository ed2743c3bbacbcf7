"""What may be said about a task or one submission of it, and the new execution it comes to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from flowfabric.errors import InvalidInput
from flowfabric.ids import check_key, check_lane, check_tags, check_text
from flowfabric.models import NewExecution
from flowfabric.policies import Duration, FrozenPolicy, RetryPolicy, duration, freeze_policy, retry_policy_to_json

OnDuplicate: TypeAlias = Literal["return", "raise", "replace"]
_ON_DUPLICATE = ("return", "raise", "replace")
# A handler that takes its worker down with it is given up after so many workers.
MAX_RECLAIMS = 5


class Options(Struct, frozen=True, kw_only=True):
    """Set on a task, overridden per submission; what is not set stays as it was.

    `deadline` counts from submission, or is a time. `delay` and `at` say when to start at the earliest. `retention` is
    how long the ended execution is kept. `on_duplicate` says what a known idempotency key leads to: the execution that
    stands (`return`), an error (`raise`), or a new one if that failed (`replace`).
    """

    lane: str | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    retry: RetryPolicy | UnsetType | None = UNSET
    attempt_timeout: Duration | UnsetType | None = UNSET
    deadline: Duration | datetime | UnsetType | None = UNSET
    delay: Duration | UnsetType | None = UNSET
    at: datetime | UnsetType | None = UNSET
    capabilities: Collection[str] | UnsetType = UNSET
    tags: Mapping[str, str] | None = None
    namespace: str | UnsetType = UNSET
    idempotency_key: str | UnsetType | None = UNSET
    dedup_window: Duration | UnsetType | None = UNSET
    on_duplicate: OnDuplicate | UnsetType = UNSET
    retention: Duration | UnsetType | None = UNSET
    max_reclaims: int | UnsetType = UNSET
    max_replays: int | UnsetType = UNSET

    def merged(self, over: Options) -> Options:
        """These, with what `over` sets put in their place; tags are added."""
        changes = {
            name: value
            for name in _FIELDS
            if (value := getattr(over, name)) is not UNSET and (value is not None or name != "tags")
        }
        if not changes:
            return self
        if "tags" in changes and self.tags:
            changes["tags"] = {**self.tags, **changes["tags"]}
        return self.replace(**changes)

    def replace(self, **changes: Any) -> Options:
        """The same with other parts."""
        return msgspec.structs.replace(self, **changes)

    def checked(self) -> Options:
        """The same, or `InvalidInput` that names what is wrong: so that a bad option fails where it is written."""
        self.item("check", b"", None)
        if self.on_duplicate is not UNSET and self.on_duplicate not in _ON_DUPLICATE:
            raise InvalidInput(f"got {self.on_duplicate!r}", field="on_duplicate", allowed=", ".join(_ON_DUPLICATE))
        if self.lane is not UNSET:
            check_lane(self.lane, "lane")
        if self.namespace is not UNSET:
            check_text(self.namespace, "namespace")
        if _given(self.idempotency_key) is not None:
            check_key(self.idempotency_key)
        if self.tags is not None:
            check_tags(self.tags)
        if self.priority is not UNSET and (type(self.priority) is not int or not -(2**31) <= self.priority < 2**31):
            raise InvalidInput(f"got {self.priority!r}", field="priority", allowed="an integer; clamped to 0..9000")
        return self

    @property
    def policy(self) -> FrozenPolicy:
        """The policy these options come to, checked and frozen."""
        try:
            return _policy(
                _given(self.retry),
                _given(self.attempt_timeout),
                None if self.capabilities is UNSET else tuple(self.capabilities),
                _given(self.retention),
                MAX_RECLAIMS if self.max_reclaims is UNSET else self.max_reclaims,
                _given(self.max_replays),
                _given(self.dedup_window),
            )
        except TypeError as error:
            raise InvalidInput(str(error), field="options") from error

    def item(
        self, kind: str, payload: bytes, encoding: str | None, *, creator: str = "", policy: FrozenPolicy | None = None
    ) -> NewExecution:
        """The new execution that these options, a task and its arguments come to."""
        at, delay = _given(self.at), _given(self.delay)
        if at is not None and delay is not None:
            raise InvalidInput("both `delay` and `at` are given", field="delay", allowed="one of them")
        deadline = _given(self.deadline)
        return NewExecution(
            execution_kind=kind,
            lane_id="default" if self.lane is UNSET else self.lane,
            namespace="" if self.namespace is UNSET else self.namespace,
            input_payload=payload,
            payload_encoding=encoding,
            priority=0 if self.priority is UNSET else self.priority,
            creator_identity=creator,
            idempotency_key=_given(self.idempotency_key),
            tags=self.tags,
            policy=policy or self.policy,
            delay_until=at if delay is None else duration(delay, "delay"),
            execution_deadline_at=(
                deadline if deadline is None or isinstance(deadline, datetime) else duration(deadline, "deadline")
            ),
        )


_FIELDS = Options.__struct_fields__
OPTION_NAMES = frozenset(_FIELDS)


def _given(value: Any) -> Any:
    return None if value is UNSET else value


@lru_cache(maxsize=1024)
def _policy(
    retry: RetryPolicy | None,
    attempt_timeout: Duration | None,
    capabilities: tuple[str, ...] | None,
    retention: Duration | None,
    max_reclaims: int,
    max_replays: int | None,
    dedup_window: Duration | None,
) -> FrozenPolicy:
    """Only what was set is written: the rest is the database's own default."""
    policy: dict[str, Any] = {"max_reclaim_count": max_reclaims}
    if retry is not None:
        if not isinstance(retry, RetryPolicy):
            raise InvalidInput(f"got {type(retry).__name__}", field="retry", allowed="a RetryPolicy or None")
        policy["retry_policy"] = msgspec.json.decode(retry_policy_to_json(retry) or "{}")
    if attempt_timeout is not None:
        policy["timeout_policy"] = {"attempt_timeout_ms": _ms(attempt_timeout, "attempt_timeout")}
    if capabilities:
        policy["routing_requirements"] = {"required_capabilities": list(capabilities)}
    if retention is not None:
        policy["stream_policy"] = {"retention_ttl_ms": _ms(retention, "retention")}
    if max_replays is not None:
        policy["max_replay_count"] = max_replays
    if dedup_window is not None:
        policy["dedup_window_ms"] = _ms(dedup_window, "dedup_window")
    text, derived = freeze_policy(policy)
    return FrozenPolicy(text or "{}", derived)


def _ms(value: Duration, field: str) -> int:
    span = duration(value, field)
    if span.total_seconds() <= 0:
        raise InvalidInput(f"got {value!r}", field=field, allowed="more than no time")
    return max(1, round(span.total_seconds() * 1000))
