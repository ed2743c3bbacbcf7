"""Results of calls that return one of a few words: each is a string, and a closed choice for type checkers."""

from __future__ import annotations

from enum import StrEnum


class PolicySet(StrEnum):
    """The result of `set_edge_group_policy`."""

    SET = "Set"
    ALREADY_SET = "AlreadySet"


class Eligibility(StrEnum):
    """Whether the dependencies of an execution let it be claimed."""

    ELIGIBLE = "eligible"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    IMPOSSIBLE = "impossible"
    NOT_RUNNABLE = "not_runnable"
    NOT_FOUND = "not_found"


class Resolution(StrEnum):
    """The result of `resolve_dependency`."""

    SATISFIED = "Satisfied"
    IMPOSSIBLE = "Impossible"
    ALREADY_RESOLVED = "AlreadyResolved"


class Promotion(StrEnum):
    """The result of `promote_delayed`."""

    PROMOTED = "promoted"
    NOT_YET_DUE = "not_yet_due"
    NOT_DELAYED = "not_delayed"
    NOT_RUNNABLE = "not_runnable"
    NOT_FOUND = "not_found"


class Expiry(StrEnum):
    """The result of `expire_execution`."""

    EXPIRED = "expired"
    RETRY_SCHEDULED = "retry_scheduled"
    NOT_YET_DUE = "not_yet_due"
    ALREADY_TERMINAL = "already_terminal"
    NOT_FOUND = "not_found"


class Drain(StrEnum):
    """The result of `drain_sibling_cancel_group`."""

    DRAINED = "drained"
    ALREADY_DRAINED = "already_drained"
    DRAINED_SANS_GROUP = "drained_sans_group"
    SIBLINGS_ALIVE = "siblings_alive"


class GroupRepair(StrEnum):
    """The result of `reconcile_sibling_cancel_group`."""

    SREMMED_STALE = "sremmed_stale"
    COMPLETED_DRAIN = "completed_drain"
    NO_OP = "no_op"


class GrantCheck(StrEnum):
    """The result of `verify_grant`."""

    OK = "ok"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    UNKNOWN_KID = "unknown_kid"
    UNKNOWN_GRANT = "unknown_grant"
    SIGNATURE_MISMATCH = "signature_mismatch"


class TokenCheck(StrEnum):
    """The result of `probe_waitpoint`."""

    OK = "ok"
    MISMATCH = "mismatch"
    CLOSED = "closed"
    UNKNOWN = "unknown"
