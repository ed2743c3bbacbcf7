"""The series: every measurement with its labels, and the bounds of times.

Labels are few and known beforehand: kinds, method names, outcomes; never an id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

# Seconds. A call takes a fraction of a millisecond, an execution may take hours.
BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)


class Metric(NamedTuple):
    """A metric: its type, labels and help text."""

    type: Literal["counter", "histogram", "gauge"]
    labels: tuple[str, ...]
    text: str


SUBMITTED: Final = "flowfabric_submitted_total"
EXECUTIONS: Final = "flowfabric_executions_total"
EXECUTION_SECONDS: Final = "flowfabric_execution_seconds"
QUEUE_SECONDS: Final = "flowfabric_queue_seconds"
END_TO_END_SECONDS: Final = "flowfabric_end_to_end_seconds"
ATTEMPTS: Final = "flowfabric_attempts_total"
RENEWALS: Final = "flowfabric_renewals_total"
CALL_SECONDS: Final = "flowfabric_call_seconds"
DUTY_SECONDS: Final = "flowfabric_duty_seconds"
DUTY_ITEMS: Final = "flowfabric_duty_items_total"
DUTY_FAILURES: Final = "flowfabric_duty_failures_total"
LEADS: Final = "flowfabric_leads"
JOINS: Final = "flowfabric_edge_group_policy_total"
SIBLINGS: Final = "flowfabric_sibling_cancel_dispatched_total"
SIBLING_FATES: Final = "flowfabric_sibling_cancel_disposition_total"
SIBLING_REPAIRS: Final = "flowfabric_sibling_cancel_reconcile_total"
CANCEL_BACKLOG: Final = "flowfabric_cancel_backlog_depth"
CLAIM_SECONDS: Final = "flowfabric_claim_seconds"
CLAIMS: Final = "flowfabric_claims_total"
BUDGET_DENIALS: Final = "flowfabric_budget_denials_total"
QUOTA_DENIALS: Final = "flowfabric_quota_denials_total"
TOKEN_FAILURES: Final = "flowfabric_token_failures_total"  # noqa: S105 - no secret
METRICS: Final[Mapping[str, Metric]] = {
    SUBMITTED: Metric("counter", ("kind",), "Executions submitted, without those that existed already."),
    EXECUTIONS: Metric("counter", ("kind", "outcome"), "Runs of a handler, by outcome."),
    EXECUTION_SECONDS: Metric("histogram", ("kind",), "How long a handler ran."),
    QUEUE_SECONDS: Metric(
        "histogram", ("kind",), "Time from creation to the first start, including a requested delay."
    ),
    END_TO_END_SECONDS: Metric(
        "histogram", ("lane",), "Time from creation to the end of a handler that succeeded, waits and retries included."
    ),
    ATTEMPTS: Metric("counter", ("lane", "outcome"), "Runs of a handler by lane and outcome, without those that park."),
    RENEWALS: Metric(
        "counter",
        ("outcome",),
        "Renewals of leases: `ok`, `lost` to another owner or to none, `locked` by another transaction for the moment, "
        "or `error`.",
    ),
    CALL_SECONDS: Metric(
        "histogram", ("method", "outcome"), "How long an engine call took, including waiting for a connection."
    ),
    CLAIM_SECONDS: Metric(
        "histogram",
        ("lane",),
        "How long a claim took, with or without work or an error; one of several lanes counts for each.",
    ),
    CLAIMS: Metric(
        "counter",
        ("lane", "result"),
        "Executions claimed (`granted`, or `reclaim` after a lost lease), and lanes of claims that got none of them"
        " (`no_work`) or failed (`error`).",
    ),
    BUDGET_DENIALS: Metric(
        "counter",
        ("dimension",),
        "Reports and reservations that did not fit under a hard limit, and executions that claims found under an"
        " exhausted budget, by dimension. Claims are counted by the process that leads the duties.",
    ),
    QUOTA_DENIALS: Metric(
        "counter",
        ("limit",),
        "Refused calls of `check_admission`, and executions that claims found under a full quota: by `rate` or"
        " `concurrency`. Claims are counted by the process that leads the duties.",
    ),
    DUTY_SECONDS: Metric(
        "histogram", ("duty", "outcome"), "How long a round of a duty took; its count is the number of rounds."
    ),
    DUTY_ITEMS: Metric("counter", ("duty",), "Items that rounds of a duty handled."),
    DUTY_FAILURES: Metric("counter", ("duty",), "Items that a round could not handle, and rounds that failed."),
    TOKEN_FAILURES: Metric(
        "counter",
        ("method",),
        "Tokens of waitpoints that did not verify: missing, wrong, or of an expired key.",
    ),
    LEADS: Metric("gauge", ("group",), "1 while this process leads the group of duties, 0 afterwards."),
    JOINS: Metric("counter", ("policy",), "Joins of flows that were submitted or grew."),
    SIBLINGS: Metric("counter", ("reason",), "Executions that a decided join no longer needed, by why."),
    SIBLING_FATES: Metric("counter", ("disposition",), "The same, by what became of each."),
    SIBLING_REPAIRS: Metric("counter", ("action",), "Looks at queued cancels that a dispatcher may have left behind."),
    CANCEL_BACKLOG: Metric("gauge", (), "Cancelled flows with members left to cancel, after the last round."),
}
