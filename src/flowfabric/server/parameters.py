"""What each parameter of a path or a query means: one sentence, for the OpenAPI document and the reference page."""

from __future__ import annotations

from typing import Final

# By name; where an operation means something else by it, as `operation.name`.
WORDS: Final = {
    # of paths
    "attempt": "The number of the attempt; the first is 0.",
    "budget_id": "The id of the budget; the list of budgets has it.",
    "bulk_id": "The id of the bulk job.",
    "callback": "The text of the link, as the task or `read_waitpoint_token` has it.",
    "code": "The code of a problem.",
    "downstream_execution_id": "The execution into which the edges lead.",
    "execution_id": "The id of the execution.",
    "flow_id": "The id of the flow.",
    "key_id": "The id of the API key, which is its middle part.",
    "lane": "The name of the lane.",
    "name": "The name of the schedule.",
    "quota_policy_id": "The id of the quota; the list of quotas has it.",
    "set_tag.key": "The key of the tag.",
    "waitpoint_id": "The id of the waitpoint; the list of pending waitpoints has it.",
    "worker_id": "The id of the worker.",
    # of queries
    "actor": "Only rows of this actor: the name of an API key, or `link`.",
    "after": "Continue after this cursor, the id of an event; `0`: with the oldest that is kept. Default: new events.",
    "all_generations": "Also the steps of runs before a replay.",
    "answer_link.name": "The name of the signal. Default: `callback`.",
    "as_of": "Leases that are expired at this time. Default: now.",
    "block_seconds": "How long to wait for the first frame.",
    "children": "Also count what it submitted.",
    "created_before": "Only executions created before this time.",
    "created_from": "Only executions created at this time or later.",
    "cursor": "The `next_cursor` of the page before, with the same filters.",
    "execution": "Only events of this execution.",
    "exhausted": "Only budgets with, or without, a limit that is used up.",
    "family": "Only events of this family; repeat it for several.",
    "flow": "Only events of members of this flow.",
    "fold": "Draw many similar nodes as one.",
    "follow_stream.after": "Continue after this event: its id, as this operation sent it.",
    "format": "The form of the response.",
    "from": "The first frame: `start`, its id, or its milliseconds.",
    "heartbeats": "Also heartbeats of workers.",
    "incoming": "Only edges into this execution.",
    "kind": "Only executions of this kind, the name of a task.",
    "limit": "How many items at most.",
    "list_audit.key_id": "Only rows of this API key.",
    "cancel_flow.wait": "How many seconds to wait until its members are cancelled.",
    "list_executions.flow_id": "Only members of this flow.",
    "list_executions.kind": "Only executions of this kind, the name of a task; repeat it for several.",
    "list_executions.lane": "Only executions in this lane; repeat it for several.",
    "list_failures.namespace": "Only this namespace. Default: all that the key reaches.",
    "list_flows.kind": "Only flows of this kind.",
    "list_schedules.namespace": "Only schedules that submit to this namespace.",
    "list_spend.execution_id": "Only what this execution spent.",
    "list_waits.key": "Only waitpoints of this key.",
    "list_waits.lane": "Only executions in this lane.",
    "list_workers.namespace": "Only workers of this namespace, without those that serve every namespace.",
    "most": "How many executions to group, the last to end first.",
    "namespace": "Only this namespace. A key with several namespaces has to name one.",
    "operation": "Only rows of this operation, such as `cancel_execution`.",
    "order_by": "`ended` needs `state`: failed, expired, cancelled or skipped.",
    "outcome": "Only rows with this outcome: `ok`, or the kind of a refusal.",
    "outgoing": "Only edges from this execution.",
    "page_events.after": "As for following. Default: the oldest event that is kept.",
    "parent_id": "Only executions that this execution submitted.",
    "prefix": "Only names that begin with this.",
    "scope_id": "Only budgets with this id in their scope.",
    "scope_type": "Only budgets of this type of scope, such as `namespace`.",
    "since": "Only rows from this time on.",
    "state": "Only executions in this state; repeat it for several.",
    "stopped": "Only executions that changed code stopped.",
    "tag": "Only what has this tag: `key=value`.",
    "tail_stream.after": "Frames after this one: the `id` that a frame has here and in `read_stream`. `0-0`: all.",
    "target": "Only rows about this id or name: of an execution, a lane, an API key, whatever was changed.",
    "to": "The last frame: `end`, its id, or its milliseconds.",
    "until": "Only rows before this time.",
    "usable": "Only keys that work now.",
    "visibility": "`exclude_best_effort` leaves out frames that are only for readers that follow.",
    "wait": "How many seconds to wait for the end.",
}
_OF_SEVERAL: Final = {"export_executions": "list_executions", "list_failures": "list_executions"}  # the same filters


def words_of(operation: str, name: str) -> str:
    """What the parameter of an operation means. `KeyError`: the table lacks it."""
    for one in (operation, _OF_SEVERAL.get(operation)):
        if (found := WORDS.get(f"{one}.{name}")) is not None:
            return found
    return WORDS[name]
