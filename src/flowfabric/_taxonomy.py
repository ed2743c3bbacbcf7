"""The properties of every kind of error: one row per (family, kind), defined only here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

ErrorClass = Literal["terminal", "retryable", "informational"]


class TaxonomyRow(NamedTuple):
    """The properties of one kind of one family.

    `code` is the word on the wire, which several kinds may share. `wire_retryable` is the flag in an HTTP
    error body: it differs from `error_class` only for contention, where reading again and retrying is
    harmless.
    """

    family: str
    kind: str
    code: str
    error_class: ErrorClass
    http_status: int
    wire_retryable: bool


def _rows(
    family: str,
    kinds: str,
    error_class: ErrorClass,
    http_status: int,
    *,
    code: str | None = None,
    wire_retryable: bool | None = None,
) -> tuple[TaxonomyRow, ...]:
    if wire_retryable is None:
        wire_retryable = error_class == "retryable"
    return tuple(
        TaxonomyRow(family, kind, code or kind, error_class, http_status, wire_retryable) for kind in kinds.split()
    )


TAXONOMY: Final[tuple[TaxonomyRow, ...]] = (
    *_rows("not_found", "not_found", "terminal", 404),
    *_rows(
        "validation",
        "invalid_input capability_mismatch invalid_capabilities invalid_policy_json invalid_blocking_reason"
        " payload_too_large signal_limit_exceeded invalid_token invalid_waitpoint_for_execution invalid_dependency"
        " invalid_kid invalid_secret_hex invalid_grace_ms retention_limit_exceeded invalid_budget_scope",
        "terminal",
        400,
    ),
    *_rows("validation", "payload_refused", "terminal", 422),
    *_rows("validation", "corruption", "terminal", 400, code="validation_error"),
    *_rows(
        "contention",
        "use_claim_resumed_execution not_a_resumed_execution execution_not_leaseable invalid_claim_grant"
        " claim_grant_expired waitpoint_not_found stale_graph_revision stale_definition execution_locked",
        "retryable",
        409,
        code="contention",
    ),
    *_rows("contention", "execution_not_active", "terminal", 409, code="contention", wire_retryable=True),
    *_rows(
        "contention",
        "execution_not_eligible no_active_lease",
        "informational",
        409,
        code="contention",
        wire_retryable=True,
    ),
    *_rows("contention", "rate_limit_exceeded", "retryable", 429),
    # Retryable for in-process callers; behind HTTP a reconciler finishes the work instead.
    *_rows("contention", "retry_exhausted", "retryable", 500, wire_retryable=False),
    *_rows(
        "conflict",
        "dependency_already_exists cycle_detected self_referencing_edge execution_already_in_flow"
        " waitpoint_already_exists rotation_conflict duplicate_submission instance_in_use api_key_exists",
        "terminal",
        409,
    ),
    *_rows("conflict", "request_in_progress", "retryable", 409),
    *_rows("state", "stale_lease", "terminal", 409, code="state_conflict"),
    *_rows("state", "stale_owner_cannot_append stream_closed", "terminal", 409, code="state_conflict"),
    *_rows("state", "lease_expired lease_revoked", "terminal", 409, code="already_satisfied"),
    *_rows(
        "state",
        "execution_not_terminal execution_redacted max_replays_exhausted not_runnable terminal flow_already_terminal"
        " lane_closed api_key_revoked",
        "terminal",
        409,
    ),
    *_rows("state", "grant_already_exists", "informational", 409, code="state_conflict"),
    *_rows("state", "already_satisfied", "informational", 409),
    *_rows(
        "state",
        "execution_not_suspended already_suspended waitpoint_closed waitpoint_not_pending"
        " pending_waitpoint_expired not_blocked_by_deps deps_not_satisfied",
        "informational",
        409,
        code="state_conflict",
    ),
    *_rows(
        "state",
        "target_not_signalable execution_not_in_flow execution_in_flow flow_not_terminal execution_needed flow_needed",
        "terminal",
        409,
        code="state_conflict",
    ),
    *_rows("transport", "transport timeout", "retryable", 503),
    *_rows("transport", "server_busy unreachable schema_locked", "retryable", 503, code="transport"),
    *_rows("transport", "protocol other", "terminal", 500),
    *_rows("transport", "wrong_password missing_privileges", "terminal", 500, code="auth"),
    *_rows(
        "transport",
        "database_missing server_too_old server_unfit bad_address schema_missing schema_older schema_newer"
        " schema_foreign",
        "terminal",
        500,
        code="other",
    ),
    *_rows("unavailable", "unavailable", "terminal", 503),
    *_rows("resource", "resource_exhausted", "retryable", 429),
    *_rows("capacity", "worker_at_capacity", "retryable", 429),
    *_rows("permission", "missing_role", "terminal", 403, code="auth"),
    *_rows("task", "failed cancelled expired skipped", "terminal", 409, code="task_failed"),
    *_rows("task", "purged", "terminal", 410),
    *_rows("step", "step_failed steps_changed", "terminal", 409),
    *_rows("wait", "wait_timed_out wait_overridden", "terminal", 409, code="no_signal"),
    *_rows("budget", "budget_hard_breach", "terminal", 409),
    *_rows("cursor", "cursor_ahead cursor_expired", "terminal", 400),
    *_rows("subscription", "stream_disconnected", "retryable", 503),
    *_rows("timed_out", "timed_out", "terminal", 500, code="timeout"),
)

BY_KIND: Final[Mapping[tuple[str, str], TaxonomyRow]] = MappingProxyType(
    {(row.family, row.kind): row for row in TAXONOMY}
)

LEASE_LOST_KINDS: Final = frozenset({"stale_lease", "lease_expired", "lease_revoked", "stale_owner_cannot_append"})
CONNECTION_KINDS: Final = frozenset(
    {
        "unreachable",
        "wrong_password",
        "missing_privileges",
        "database_missing",
        "server_too_old",
        "server_unfit",
        "bad_address",
        "schema_missing",
        "schema_older",
        "schema_newer",
        "schema_foreign",
        "schema_locked",
    }
)

# Kinds that are raised as a subclass, so that `except LeaseLost` cannot miss one.
SPECIAL: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("validation", "invalid_input"): "InvalidInput",
        ("validation", "corruption"): "Corruption",
        ("validation", "payload_refused"): "PayloadRefused",
        ("contention", "execution_not_active"): "ExecutionNotActive",
        ("task", "purged"): "Purged",
        ("step", "step_failed"): "StepFailed",
        ("step", "steps_changed"): "StepsChanged",
        ("contention", "retry_exhausted"): "RetriesExhausted",
        **{("state", kind): "LeaseLost" for kind in LEASE_LOST_KINDS},
        **{("transport", kind): "ConnectionFailed" for kind in CONNECTION_KINDS},
    }
)
