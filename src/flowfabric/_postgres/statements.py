"""Every call of a SQL function, by chapter. Python names the columns it reads; a test prepares each of them.

`_rows` renders a call that returns rows, `_value` one that returns a single value under a name.
"""

from __future__ import annotations


def _marks(count: int) -> str:
    return ", ".join(f"${n}" for n in range(1, count + 1))


def _rows(function: str, arguments: int | str, columns: str) -> str:
    """The call with that many arguments, or with these written out."""
    given = arguments if isinstance(arguments, str) else _marks(arguments)
    return f"select {columns} from flowfabric.{function}({given})"  # noqa: S608 - no value is part of it


def _value(function: str, arguments: int | str, name: str) -> str:
    given = arguments if isinstance(arguments, str) else _marks(arguments)
    return f"select flowfabric.{function}({given}) as {name}"


# Columns that several calls return

VERDICT = "ordinal, code, detail, state, lease_epoch, attempt_id, at"
CLAIMED = (
    "partition, id, handle_kind, attempt_index, attempt_id, attempt_type, lease_id, lease_epoch, lease_expires_at,"
    " lane, kind, namespace, flow_id, priority, created_at, payload, payload_encoding, tags, deadline_at,"
    " attempt_timeout_at, retries, reclaims, replays, upstreams, upstream_states, upstream_results, upstream_encodings,"
    " durability_mode, has_steps"
)
_CREATED = "ordinal, code, id, state"
_GRANT = "code, detail, state, lease_epoch, attempt_id, at, lane"
_INFO = (
    "partition, id, namespace, lane, priority, kind, state, blocking_reason, blocking_detail, pending, resume_pending,"
    " lease_lost, attempts, attempt_index, created_at, started_at, completed_at, flow_id, node, parent_id, arguments,"
    " version, stops, forked_from, forked_before"
)
EVENT = (
    "seq, occurred_at, partition, id, flow_id, namespace, tags, lease_type, outcome, operator_type, signal_effect,"
    " worker_type, lease_id, lease_epoch, attempt_id, attempt_index, worker_id, worker_instance_id, reason, revoked_by,"
    " details, parent_id, lane, kind, actor, log_epoch"
)
_SIGNAL = (
    "signal_id, signal_name, signal_category, source_type, source_identity, correlation_id, accepted_at, payload,"
    " payload_encoding, waitpoint_key"
)
_FLOW = "partition, flow_id, created_at, state, summary, flow_kind, namespace, node_count"
_SCHEDULE = (
    "name, kind, timing, catch_up, options, paused, next_at, last_at, last_partition, last_id, created_at, updated_at,"
    " payload, payload_encoding"
)
_CREATE_TYPES = (
    "text[]", "text[]", "text[]", "integer[]", "integer[]", "uuid[]", "boolean", "text[]", "text[]", "bytea[]",
    "text[]", "integer[]", "uuid[]", "text[]", "bigint[]", "text[]", "text[]", "text[]", "text[]", "timestamptz[]",
    "bigint[]", "timestamptz[]", "bigint[]",
)  # fmt: skip
_STANDING_TYPES = ("integer[]", "uuid[]", "text[]", "text[]", "uuid[]", "text[]")
# A driver that does not know the partition count sends the last bits of the ids, and the statement itself makes
# partitions of them.
_HOMES = (
    "(select array_agg(mod(u.bits, d.flow_partitions) order by u.place)"
    " from flowfabric.deployment_info() d, unnest({}) with ordinality as u (bits, place))"
)


_HOME = "mod({}, (select d.flow_partitions from flowfabric.deployment_info() d))"
_GROW_TYPES = (
    "integer", "uuid", "boolean", "text", "text", "text", "text[]", "text[]", "text[]", "integer[]", "uuid[]", "text[]",
    "text[]", "text[]", "bytea[]", "text[]", "integer[]", "text[]", "text[]", "text[]", "text[]",
    "timestamptz[]", "bigint[]", "timestamptz[]", "bigint[]",
    "uuid[]", "uuid[]", "integer[]", "integer[]", "text[]", "boolean[]", "integer[]",
    "integer[]", "text[]", "integer[]", "boolean[]",
)  # fmt: skip


def _typed(placeholder: str, types: tuple[str, ...], partition: int | None) -> str:
    marks = [f"{placeholder.format(n)}::{type_name}" for n, type_name in enumerate(types, 1)]
    if partition is not None:
        home = _HOMES if types[partition - 1].endswith("[]") else _HOME
        marks[partition - 1] = home.format(marks[partition - 1])
    return ", ".join(marks)


def create_executions(placeholder: str = "${}", *, hashed: bool = False) -> str:
    """The create call for any driver, with `placeholder` formatted by the number of the argument.

    `hashed`: the call was laid out without the partition count.
    """
    return _rows("create_executions", _typed(placeholder, _CREATE_TYPES, 5 if hashed else None), _CREATED)


def standing_executions(placeholder: str = "${}", *, hashed: bool = False) -> str:
    """The question behind `CreateCall.doubts`, rendered like `create_executions`."""
    given = _typed(placeholder, _STANDING_TYPES, 1 if hashed else None)
    return _rows("standing_executions", given, "ordinal, code, id")


# The rest of what is called through any driver; an id comes with its last bits in place of the partition.


def read_kind(placeholder: str) -> str:
    return _rows("read_executions", _typed(placeholder, ("integer[]", "uuid[]"), 1), "kind")


def find_limits(placeholder: str) -> str:
    return _rows("find_limits", _typed(placeholder, ("text[]", "text[]"), None), "what, name, id, key")


def free_key(placeholder: str) -> str:
    return _value("free_key", _typed(placeholder, ("integer", "uuid", "uuid", "text", "text"), 1), "freed")


def grow_flow(placeholder: str) -> str:
    return _rows("grow_flow", _typed(placeholder, _GROW_TYPES, 1), "code, place")


def read_nodes(placeholder: str) -> str:
    return (
        _rows("read_members", f"{placeholder.format(1)}::uuid, false, null, null, null", "id, node")
        + " where node is not null"
    )


def set_wake(placeholder: str) -> str:
    """Whether what the rest of the transaction submits notifies workers: `on` or `off`."""
    return f"select set_config('flowfabric.wake', {placeholder.format(1)}::text, true) as wake"


# Executions

CREATE_EXECUTIONS = create_executions()
CREATE_ONE = _rows("create_one", 8, _CREATED)
STANDING_EXECUTIONS = standing_executions()
COMPLETE = _rows("complete", 8, VERDICT)
COMPLETE_AS_OPERATOR = _rows("complete_as_operator", 4, VERDICT)
FAIL = _rows("fail", 10, VERDICT)
FAIL_AS_OPERATOR = _rows("fail_as_operator", 6, VERDICT)
CANCEL = _rows("cancel", 9, VERDICT)
CANCEL_AS_OPERATOR = _rows("cancel_as_operator", 10, VERDICT)
REPLAY = _rows("replay", 4, VERDICT)
DELETE_EXECUTION = _rows("delete_execution", 2, VERDICT)
REDACT_EXECUTION = _rows("redact_execution", 2, VERDICT)
CHANGE_PRIORITY = _rows("change_priority", 5, VERDICT)
BLOCK = _rows("block", 4, VERDICT)
UNBLOCK = _rows("unblock", 3, VERDICT)
FREE_KEY = _value("free_key", 5, "freed")
SET_TAG = _value("set_tag", 4, "found")

# Claims and leases

CLAIM = _rows("claim", f"{_marks(12)}, true", CLAIMED)
CLAIM_LANES = _rows(
    "claim_lanes", "$1::text::text[], $2::text::integer[], $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13", CLAIMED
)
SLEEP_FOR_WORK = _value("sleep_for_work", 7, "until")
REGISTER_SERVICE = _value("register_service", 4, "service")
RENEW = _rows("renew", 8, VERDICT)
PROGRESS = _rows("progress", 8, VERDICT)
DELAY = _rows("delay", 8, VERDICT)
DELAY_AS_OPERATOR = _rows("delay_as_operator", 4, VERDICT)
RELEASE = _rows("release", 6, VERDICT)
RELEASE_AS_OPERATOR = _rows("release_as_operator", 2, VERDICT)
STOP_CHANGED = _rows("stop_changed", 8, VERDICT)
WAIT_CHILDREN = _rows("wait_children", 6, VERDICT)
WAIT_CHILDREN_AS_OPERATOR = _rows("wait_children_as_operator", 2, VERDICT)
REVOKE_LEASE = _rows("revoke_lease", 5, VERDICT)
LIST_EXPIRED_LEASES = _rows(
    "list_expired_leases",
    "coalesce($1, flowfabric.server_now()), $2, $3, $4, $5",
    "partition, id, lease_id, epoch, worker_instance_id, lease_expires_at, attempt_index",
)

# Grants

CLAIM_FOR_WORKER = _rows("claim_for_worker", 10, "code, kind, partition, id, is_resumed, grant_key, expires_at")
ISSUE_CLAIM_GRANT = _rows("issue_claim_grant", 10, _GRANT)
ISSUE_RECLAIM_GRANT = _rows("issue_reclaim_grant", 11, _GRANT)
VERIFY_GRANT = _value("verify_grant", 3, "answer")
CLAIM_GRANTED = _rows("claim_granted", 13, f"code, detail, {CLAIMED}")
CLAIM_AS_OPERATOR = _rows("claim_as_operator", 6, f"code, detail, {CLAIMED}")
RECLAIM = _rows("reclaim", 11, f"code, detail, {CLAIMED}")
SCAN_ELIGIBLE = _rows("scan_eligible", 3, "partition, id")

# Steps

RECORD_STEPS = _rows("record_steps", 18, VERDICT)
READ_STEPS = _rows(
    "read_steps",
    7,
    "partition, id, generation, name, n, kind, run, attempt_index, result, encoding, error, at, child_partition,"
    " child_id, seconds, recorded_at, waitpoint_ids, outcome, flow_id, is_stray, is_unread, place",
)
FORK_EXECUTION = _rows("fork_execution", 9, "code, detail, copied")
READ_STARTED = _rows("read_started", 2, f"{CLAIMED}, version")
SUBMIT_CHILD = _rows("submit_child", 33, _CREATED)

# Children

SUBMIT_CHILD_FLOW = _rows("submit_child_flow", 46, "code, place, revision")
CANCEL_CHILDREN = _rows("cancel_children", 3, "parent, cancelled, failed, message, more")
LIST_CHILDREN = _rows(
    "list_children", 3, "parent, id, is_flow, name, node, state, created_at, completed_at, depth, arguments"
)

# Budgets

_USED = (
    "ordinal, code, detail, state, lease_epoch, attempt_id, at, budget_id, dimension, current, held, bound, asked,"
    " overrun, reservation_id, reservation_state, dimensions, amounts, left_dimensions, left_amounts"
)
_BUDGET = (
    "id, name, scope_type, scope_id, mode, on_hard_limit, on_soft_limit, reset_interval_ms, dimensions, hard, soft,"
    " used_dimensions, used, held, overrun, exhausted, breaches, soft_breaches, last_breach_at, last_breach_dim,"
    " generation, reset_count, last_reset_at, next_reset_at, created_at, updated_at, owner_id, defined_at"
)
USE_BUDGETS = _rows("use_budgets", 17, _USED)
REPORT_USAGE_ADMIN = _rows("report_usage_admin", 4, _USED)
RECORD_SPEND = _rows("record_spend", 6, _USED)
CREATE_BUDGET = _rows("create_budget", 13, "code, id")
UPDATE_BUDGET = _rows(
    "update_budget", 13, "code, dimension, " + ", ".join(f"(status).{c}" for c in _BUDGET.split(", "))
)
READ_BUDGETS = _rows("read_budgets", 1, _BUDGET)
LIST_BUDGETS = _rows("list_budgets", 7, _BUDGET)
FIND_BUDGETS = _rows("find_budgets", 1, "name, id")
RESET_BUDGET = _rows("reset_budget", 1, "code, next_reset_at")
RESET_DUE_BUDGETS = _rows("reset_due_budgets", 2, "handled, failed, message, more")
COLLECT_ENDED = _rows("collect_ended", 3, "handled, failed, message, more")
RECONCILE_BUDGETS = _rows("reconcile_budgets", 3, "corrected, wrong, message, last_id, last_spent")
RELEASE_BUDGET = _value("release_budget", 2, "released")
LIST_SPEND = _rows("list_spend", 6, "execution_id, generation, dimension, amount, recorded_at")
PAUSE_FOR_BUDGET = _rows("pause_for_budget", 9, VERDICT)
READ_USAGE = _rows("read_usage", 7, "id, parent_id, budget_id, name, dimension, used, held")

# Streams

APPEND_FRAMES = _rows("append_frames", 20, "ordinal, code, detail, ms, n, frame_count, summary_version, maxlen_applied")
READ_STREAMS = _rows(
    "read_streams",
    9,
    "ordinal, ms, n, mode, kind, frame_type, encoding, payload, correlation_id, seq, summary_version, ttl_ms, is_known,"
    " attempts, ended, attempt_index, frame_count, maxlen_applied, closed_at, closed_reason, number",
)
READ_LAST_FRAMES = _rows(
    "read_last_frames",
    3,
    "ordinal, attempt_index, ms, n, mode, kind, frame_type, encoding, payload, correlation_id, seq, summary_version,"
    " ttl_ms",
)
READ_STREAM_SUMMARY = _rows("read_stream_summary", 3, "attempt_index, document, version, first_ms, last_ms")
COUNT_EMITTED = _rows("count_emitted", 3, "mode, frame_type, type_marks, marks")

# Outcomes

WATCH = _value("watch", 5, "watched")
UNWATCH = _value("unwatch", 4, "unwatched")
READ_OUTCOMES = _rows(
    "read_outcomes",
    2,
    "ordinal, state, result, result_encoding, failure_reason, failure_category, cancellation_reason",
)

# Waits: waitpoints, suspensions, signals, and the waits of handlers

CREATE_WAITPOINT = _rows("create_waitpoint", 10, f"{VERDICT}, token")
CLOSE_WAITPOINT = _rows("close_waitpoint", 8, VERDICT)
EXPIRE_WAITPOINT = _value("expire_waitpoint", 3, "code")
LIST_PENDING_WAITPOINTS = _rows(
    "list_pending_waitpoints",
    4,
    "waitpoint_id, waitpoint_key, state, required_signal_names, created_at, activated_at, expires_at, token_kid,"
    " token_fingerprint",
)
READ_WAITPOINT_TOKEN = _value("read_waitpoint_token", 2, "token")
PROBE_WAITPOINT = _value("probe_waitpoint", 4, "code")
SUSPEND = _rows(
    "suspend",
    19,
    "code, detail, state, lease_epoch, attempt_id, variant, suspension_id, waitpoint_ids, waitpoint_keys, tokens,"
    " attempt_index, lane, worker_instance_id, lease_ttl_ms",
)
RESUME_EXECUTION = _rows("resume_execution", 4, VERDICT)
EXPIRE_SUSPENSION = _rows("expire_suspension", 2, "code, behavior")
READ_SUSPENSION = _rows(
    "read_suspension",
    2,
    "suspension_id, attempt_index, waitpoint_ids, waitpoint_keys, reason_code, requested_by,"
    " continuation_metadata_pointer, resume_condition, resume_policy, suspended_at, timeout_at, timeout_behavior,"
    " last_signal_at, satisfied_at, closed_at, close_reason, trigger_type, closer_signal_id, satisfier_signal_ids",
)
LIST_SUSPENDED = _rows("list_suspended", 4, "id, suspended_at, reason_code, timeout_at")
DELIVER_SIGNAL = _rows("deliver_signal", 20, "code, detail, signal_id, effect, match_detail")
DELIVER_SIGNAL_AS_OPERATOR = _rows("deliver_signal_as_operator", 19, "code, detail, signal_id, effect, match_detail")
SIGNAL_BY_KEY = _rows("signal_by_key", 18, "code, detail, signal_id, effect, match_detail, keys")
OBSERVE_SIGNALS = _rows("observe_signals", 3, _SIGNAL)
READ_SIGNALS = _rows(
    "read_signals",
    4,
    f"{_SIGNAL}, ordinal, waitpoint_id, suspension_id, target_scope, created_at, observed_effect, match_detail,"
    " refused",
)
PARK = _rows("park", 16, VERDICT)
OPEN_WAIT = _rows("open_wait", 12, f"{VERDICT}, waitpoint_ids, waitpoint_keys, tokens")
SETTLE_WAIT = _rows("settle_wait", 14, f"{VERDICT}, outcome, result, seen")
REFUSE_SIGNALS = _rows("refuse_signals", 10, VERDICT)
LIST_WAITS = _rows(
    "list_waits",
    6,
    "partition, id, kind, lane, namespace, waitpoint_id, waitpoint_key, state, reason_code, created_at, timeout_at,"
    " timeout_behavior, required_signal_names, signal_count, refused_signal_count",
)

# Keys

SEED_SECRET = _rows("seed_secret", 2, "code, detail")
ROTATE_SECRET = _rows("rotate_secret", 3, "code, detail, purged")
LIST_KIDS = _rows("list_kids", 0, "kid, state, expires_at")

# Flows

GROW_FLOW = _rows("grow_flow", 36, "code, place, revision")
CREATE_FLOW = _value("create_flow", 4, "made")
ADD_TO_FLOW = _rows("add_to_flow", 3, "code, place, other, members")
DELETE_FLOW = _value("delete_flow", 2, "code")
DESCRIBE_FLOW = _rows(
    "describe_flow",
    2,
    "flow_id, flow_kind, namespace, state, node_count, edge_count, created_at, last_mutation_at, cancelled_at,"
    " cancel_reason, cancellation_policy, tags, downstreams, policies, ks, cancel_rests, ns, succeededs, faileds,"
    " skippeds, states, satisfied_ats, parent_id",
)
READ_MEMBERS = _rows(
    "read_members",
    5,
    "partition, id, node, kind, state, created_at, started_at, completed_at, failure_reason, failure_category,"
    " cancellation_reason, result, result_encoding",
)
READ_NODES = _rows("read_members", "$1, false, null, null, null", "partition, id, node") + " where node is not null"
FLOW_PROGRESS = _rows("flow_progress", 2, "members, live, state")
LIST_FLOWS = _rows("list_flows", "$1, $2, null, null, null, null, $3", _FLOW)
FIND_FLOWS = _rows("list_flows", "null, null, $1, $2, $3, $4, $5", _FLOW)
SET_FLOW_TAGS = _value("set_flow_tags", 3, "found")
READ_FLOW_TAGS = _rows("read_flow_tags", 2, "tags")
PROJECT_FLOWS = _value("project_flows", 2, "n")
PROJECT_TOUCHED = _rows("project_touched", 1, "counted, more")
READ_SUMMARY = _rows(
    "read_summary",
    3,
    "flow_id, state, updated_at, completed, failed, cancelled, expired, skipped, active, suspended, waiting, delayed,"
    " rate_limited, waiting_children",
)
FLOW_ELIGIBILITY = _value("flow_eligibility", 2, "status")

# Edges

STAGE_EDGES = _rows("stage_edges", 8, "code, place, revision")
APPLY_EDGE = _rows("apply_edge", 7, "code, unsatisfied, detail")
SET_GROUP_POLICY = _value("set_group_policy", 6, "code")
READ_EDGES = _rows("read_edges", 7, "edge_id, upstream, downstream, data_passing_ref, applied_at, created_at")
RESOLVE_DEPENDENCY = _value("resolve_dependency", 6, "code")
PROMOTE_BLOCKED = _value("promote_blocked", 2, "code")
RECONCILE_EDGES = _rows("reconcile_edges", 7, "scanned, reconciled, partition, flow_id, downstream")

# Cascades, sibling cancels, cancelled flows

DISPATCH_CASCADES = _rows("dispatch_cascades", 9, "seen, finished, resolved, failed, message, more, last_event")
CASCADE_PENDING = _value("cascade_pending", 1, "pending")
CANCEL_SIBLINGS = _rows(
    "cancel_siblings", 5, "action, reason, cancelled, already_terminal, missing, failed, message, enqueued_at"
)
DRAIN_SIBLINGS = _value("drain_siblings", 3, "action")
RECONCILE_SIBLINGS = _value("reconcile_siblings", 3, "action")
QUEUED_SIBLINGS = _rows("queued_siblings", 1, "partition, flow_id, downstream, siblings, enqueued_at")
CANCEL_FLOW_HEADER = _rows("cancel_flow_header", 6, "code, policy, reason, members, targets")
CANCEL_MEMBERS = _rows("cancel_members", 4, "handled, failed, message, remaining, last, busy")
ACK_CANCEL_MEMBER = _value("ack_cancel_member", 3, "acknowledged")
READ_CANCEL_BACKLOG = _rows(
    "read_cancel_backlog", 2, "requested_at, requester, reason, cancellation_policy, grace_until, owed"
)
DUE_CANCELLATIONS = _rows("due_cancellations", 2, "partition, flow_id, backlog")

# Limits and quotas

FIND_LIMITS = _rows("find_limits", 2, "what, name, id, key")
_HELD = (
    "id, kind, lane, namespace, limit_id, limit_key, rank, created_at, blocked_at, retry_at,"
    " needs::text as needs, detail"
)
LIST_HELD = _rows("list_held", 16, _HELD)
READ_HELD = _rows("read_held", 2, _HELD)
COUNT_HELD = _rows("count_held", 1, "lane, limit_id, what, name, held")
COUNT_DENIALS = _rows("count_denials", 2, "denied_at, lane, reason, dimension, count")
READ_DENIALS = _rows("read_denials", 0, "reason, dimension, count")
FIND_UNREPORTED = _rows("find_unreported", 1, "name")
READ_DECLARED_LIMITS = _rows("read_declared_limits", 1, "name, digest")
NOTE_DECLARED_LIMITS = _value("note_declared_limits", 2, "noted")
BIND_LIMIT = _value("bind_limit", 8, "code")
UNBIND_LIMIT = _value("unbind_limit", 7, "existed")
LIST_BINDINGS = _rows(
    "list_bindings",
    4,
    "id, what, limit_id, name, lane, kind, namespace, tag, value, flow_kind, is_declared, created_at",
)
UNBLOCK_LIMITED = _rows("unblock_limited", 7, "promoted, looked, failed, message, last_limit, last_key")
CREATE_QUOTA_POLICY = _value("create_quota_policy", 7, "code")
UPDATE_QUOTA_POLICY = _value("update_quota_policy", 6, "code")
LIST_QUOTA_POLICIES = _rows(
    "list_quota_policies",
    5,
    "id, name, key, window_seconds, max_requests, max_concurrent, jitter_ms, created_at, updated_at, active, admitted,"
    " waiting, next_free_at",
)
LIST_QUOTA_KEYS = _rows("list_quota_keys", 3, "key, active, admitted, waiting, next_free_at")
CHECK_ADMISSION = _rows("check_admission", 8, "code, retry_after_ms")
RELEASE_ADMISSION = _value("release_admission", 3, "released")
RECONCILE_QUOTAS = _rows("reconcile_quotas", 4, "entries, slots, heads, last_policy, last_key, last_number")

# Reads

READ_EXECUTIONS = _rows(
    "read_executions",
    2,
    f"{_INFO}, creator, idempotency_key, payload_encoding, tags, policy, capabilities, budget_ids, quota_policy_ids,"
    " retries, replays, reclaims, epoch, attempt_id, lease_id, worker_id, worker_instance_id, lease_acquired_at,"
    " lease_expires_at, lease_renewed_at, lease_ttl_ms, lease_lost_at, lease_revoke_reason, delay_until, deadline_at,"
    " attempt_timeout_at, attempt_timeout_left, has_result, result_encoding, failure_reason, failure_category,"
    " cancellation_reason, cancelled_by, progress_pct, progress_message, progress_updated_at, capability_mismatch_at,"
    " hmac_failed_at, suspension_timeout_at, current_waitpoint_id, transitioned_at, mutated_at",
)
READ_RESULT = _rows("read_result", 2, "result, result_encoding")
READ_PAYLOAD = _rows("read_payload", 2, "payload, payload_encoding, kind, tags")
LIST_ATTEMPTS = _rows(
    "list_attempts",
    4,
    "attempt_index, attempt_id, attempt_type, attempt_lifecycle, started_at, resumed_at, suspended_at, ended_at,"
    " lease_id, lease_epoch, worker_id, worker_instance_id, failure_reason, failure_category, policy_snapshot,"
    " retry_reason, previous_attempt_index, replay_reason, replay_requested_by, replayed_from_attempt_index,"
    " reclaim_reason, disposition, retry_at",
)
LIST_PARTITION = _rows("list_partition", 3, _INFO)
FIND = _rows("find", 17, _INFO)
FIND_IDS = _rows("find_ids", 6, "id, is_flow, kind, state, summary, created_at")

# Lanes

REGISTER_LANES = _value("register_lanes", 1, "made")
LIST_LANES = _rows("list_lanes", 2, "name, state, registered_at, registered_by")
SET_LANE_STATE = _value("set_lane_state", 3, "before")
READ_GAUGES = _rows("read_gauges", 1, "what, name, value, oldest_at, at")
LANE_STATS = _rows("lane_stats", 1, "name, state, depth, oldest_at, delayed, waiting_children, running, at")

# Workers

_WORKER = (
    "namespace, worker_instance_id, worker_id, lanes, kinds, versions, capabilities, liveness_ttl, registered_at,"
    " heartbeat_at, expires_at, slots, package_version, host, pid, leads"
)
REGISTER_WORKER = _rows("register_worker", 15, "code, expires_at, host, pid")
HEARTBEAT_WORKER = _rows("heartbeat_worker", 3, "code, expires_at")
# Heartbeats of the worker library. A heartbeat that a crash of the server undoes does no harm, so it commits
# asynchronously unless it is part of a renewal.
_LAZILY = "set_config('synchronous_commit', 'off', true) as commits"
HEARTBEAT_LAZILY = _rows("heartbeat_worker", 3, f"code, expires_at, {_LAZILY}")
SLEEP_AND_HEARTBEAT = _rows(
    "heartbeat_worker", "$8, $9, $10", f"code, expires_at, flowfabric.sleep_for_work({_marks(7)}) as until, {_LAZILY}"
)
RENEW_AND_HEARTBEAT = f"{RENEW} union all " + _rows(
    "heartbeat_worker", "$9, $10, $11", "0, code, null, null, null, null, expires_at"
)
MARK_WORKER_DEAD = _value("mark_worker_dead", 3, "code")
LEAVE_REGISTRY = _value("leave_registry", 4, "code")
LIST_WORKERS = _rows("list_workers", 4, _WORKER)
LIST_WORKER_EVENTS = _rows("list_worker_events", 4, "seq, occurred_at, event, worker_id, reason")
FIND_UNSERVED = _rows(
    "find_unserved", 2, "lane, lane_state, kind, capabilities, namespace, workers, version, is_stopped"
)
LIST_VERSIONS = _rows("list_versions", 0, "lane, kind, capabilities, version, executions, workers")
LIST_UNCOVERED = _rows("list_uncovered", 1, "lane, kind, capabilities, version, served, since, waiting")
JUDGE_ALL = _value("judge_all", 0, "changed")
SWEEP_WORKERS = _value("sweep_workers", 1, "n")
TRIM_WORKER_EVENTS = _value("trim_worker_events", 1, "n")

# Schedules

PUT_SCHEDULE = _value("put_schedule", 9, "did")
LIST_SCHEDULES = _rows("list_schedules", "null, $1, $2, $3", _SCHEDULE)
READ_SCHEDULE = _rows("list_schedules", "$1, null, null, 1", _SCHEDULE)
SCHEDULE_AS_DUE = _rows(
    "list_schedules",
    "$1, null, null, 1",
    "name, kind, timing, catch_up, payload, payload_encoding, options, flowfabric.server_now() as now",
)
PAUSE_SCHEDULE = _value("set_schedule_paused", "$1, true, null, $2", "found")
RESUME_SCHEDULE = _value("set_schedule_paused", "$1, false, $2, $3", "found")
DELETE_SCHEDULE = _value("delete_schedule", 2, "found")
DUE_SCHEDULES = _rows(
    "due_schedules", 1, "name, kind, timing, catch_up, payload, payload_encoding, options, next_at, now, live_id"
)
NEXT_SCHEDULE = _value("next_schedule", 0, "seconds")
FIRE_SCHEDULE = _rows("fire_schedule", 27, _CREATED)
SKIP_SCHEDULE = _rows("advance_schedule", "$1, $2, $3, null", "moved")

# Events

READ_EVENTS = _rows("read_events", 11, f"{EVENT}, at_end, is_busy")
LIST_EVENTS = _rows("list_events", 6, EVENT)
COUNT_EVENTS = _rows(
    "count_events", 2, "seq, lease_type, outcome, operator_type, signal_effect, worker_type, n, log_epoch"
)
REGISTER_CONSUMER = _rows("register_consumer", 6, "code, families, filter, log_position, log_epoch")
TAKE_CONSUMER = _rows("take_consumer", 5, "code, log_position, log_epoch, left_ms, families, filter")
MOVE_CONSUMER = _value("move_consumer", 5, "moved")
FAIL_CONSUMER = _value("fail_consumer", 3, "told")
LEAVE_CONSUMER = _value("leave_consumer", 2, "left")
SET_CONSUMER = _value("set_consumer", 3, "moved")
DELETE_CONSUMER = _value("delete_consumer", 1, "deleted")
LIST_CONSUMERS = _rows(
    "list_consumers",
    2,
    "name, created_at, instance, host, pid, families, filter, log_position, log_epoch, handled, moved_at, failures,"
    " failure, lag, next_at, is_expired, retention",
)
SEEK_EVENTS = _rows("seek_events", 1, "log_position, log_epoch")
SLEEP_FOR_EVENTS = _value("sleep_for_events", 3, "until")
BEGIN_EPOCH = _value("begin_epoch", 0, "begun")

# Timers and the audit

RUN_ONE = _rows("run_one", 3, "code, state, lease_lost")
RUN_TIMERS = _rows("run_timers", 7, "handled, failed, message, more, last_due_at")
SWEEP = _rows("sweep", 1, "grants, usage_keys, total")
SUBMIT_HOOKS = _rows("submit_hooks", 2, "submitted, failed, message, more")
NEXT_DUE = _value("next_due", 1, "at")
LOOK_FOR_DUE = _rows("look_for_due", 5, "due, low_water, pause_ms, announced")
TAKE_LEAD = _rows("take_lead", 3, "name, is_ours, left_ms")
LEAVE_LEAD = _value("leave_lead", 1, "left")
LIST_LEADS = _rows("list_leads", 0, "name, process, left_ms, worker_instance_id")
AUDIT = _rows("audit", 2, "rule, partition, id, detail")
AUDIT_SAMPLE = _rows("audit_sample", 2, "rule, partition, id, detail")
REPAIR_FLOORS = _rows("repair_floors", 1, "partition, id")

# The server: API keys, the audit log, kept answers, bulk jobs, namespaces, failures

_API_KEY = "id, name, scopes, namespaces, hides_payloads, created_at, expires_at, revoked_at, last_used_at"
CREATE_API_KEY = _rows("create_api_key", 8, "code, created_at, expires_at")
READ_API_KEY = _rows("read_api_key", 1, f"{_API_KEY}, digest, old_digest, is_usable, now")
LIST_API_KEYS = _rows("list_api_keys", 4, _API_KEY)
REVOKE_API_KEY = _value("revoke_api_key", 1, "found")
ROTATE_API_KEY = _rows("rotate_api_key", 3, "code, name")
NOTE_API_KEY_USE = _value("note_api_key_use", 1, "at")
SET_ACTOR = "select set_config('flowfabric.actor', $1, true) as actor"
WRITE_OPERATOR_AUDIT = _value("write_operator_audit", 7, "seq")
LIST_OPERATOR_AUDIT = _rows(
    "list_operator_audit", 10, "seq, at, actor, key_id, address, operation, target, outcome, request_id"
)
BEGIN_ANSWER = _rows("begin_answer", 7, "code, status, headers, body")
FINISH_ANSWER = _value("finish_answer", 7, "finished")
FORGET_ANSWER = _value("forget_answer", 4, "forgotten")
IN_NAMESPACES = _value("in_namespaces", 4, "known")
CREATE_BULK = _value("create_bulk", 15, "made")
LIST_BULK = _rows(
    "list_bulk",
    3,
    "id, operation, state, reason, actor, key_id, created_at, ended_at, namespace, lanes, kinds, states, tag_key,"
    " tag_value, flow_id, parent_id, created_from, created_before, changed, unchanged, refused, refusals, failure",
)
RUN_BULK = _rows("run_bulk", 3, "state, handled")
STOP_BULK = _value("stop_bulk", 3, "state")
LIST_FAILURES = _rows(
    "list_failures",
    10,
    "kind, state, error_type, message, n, last_ended_at, last_id, last_text, examined, is_complete",
)

# The deployment

PING = "select 1 as one"
IS_OWNER = (
    "select coalesce((select pg_has_role(n.nspowner, 'usage') from pg_namespace n where n.nspname = 'flowfabric'),"
    " false) as is_owner"
)
DEPLOYMENT_INFO = _rows(
    "deployment_info",
    0,
    "schema_version, steps, functions, functions_version, functions_oldest, flow_partitions,"
    " current_setting('default_transaction_isolation') as isolation",
)
FLOW_PARTITIONS = _rows("deployment_info", 0, "flow_partitions")
SERVER_TIME_MS = _value("server_time_ms", 0, "ms")
