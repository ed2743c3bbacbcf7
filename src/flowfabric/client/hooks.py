"""Hooks: tasks that are submitted when an execution fails for good or its wait is escalated.

The policy of an execution holds what to submit (`hook_spec`). The engine writes the facts as the payload of the hook's
execution, and the worker that runs it makes its argument of them (`facts_as_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from flowfabric.client.failure import parse_failure
from flowfabric.client.submission import Submittable
from flowfabric.contracts.codecs import CannotDecode, Codecs
from flowfabric.contracts.json_types import ENCODER
from flowfabric.contracts.signature import Signature
from flowfabric.errors import InvalidInput
from flowfabric.values.hooks import Escalation, Failure
from flowfabric.values.ids import ExecutionId
from flowfabric.values.policies import FrozenPolicy
from flowfabric.values.state import State

_NOW: Final = datetime(2000, 1, 1, tzinfo=UTC)
_ID: Final = ExecutionId(UUID(int=0))
# What the task of each hook must take.
_SAMPLES: Final[Mapping[str, Failure | Escalation]] = {
    "on_failure": Failure(execution_id=_ID, kind="", lane="", attempt=1, at=_NOW, state=State.FAILED, message=""),
    "on_escalate": Escalation(
        execution_id=_ID, kind="", lane="", attempt=1, at=_NOW, reason="", waitpoints=(), waiting_since=_NOW,
        timeout_at=_NOW,
    ),
}  # fmt: skip
HOOKS: Final = {"on_failure": "failure", "on_escalate": "escalation"}


def check_hook(task: Submittable[Any], field: str) -> None:
    """Refuse a task that could not run as this hook."""
    sample = _SAMPLES[field]
    allowed = f"a task with one argument, annotated ff.{type(sample).__name__}"
    first, *others = task.signature.parameters or (None,)
    if first is None or any(each.required for each in others):
        raise InvalidInput(f"{task.name} takes other arguments", field=field, allowed=allowed)
    try:
        task.signature.decode(ENCODER.encode({first.name: sample}))
    except CannotDecode as error:
        raise InvalidInput(f"{task.name} does not take it ({error.problem})", field=field, allowed=allowed) from None
    for option in ("at", "idempotency_key"):
        if getattr(task.defaults, option):
            raise InvalidInput(f"{task.name} sets {option}", field=field, allowed="a task that can be submitted often")


def hook_spec(task: Submittable[Any]) -> dict[str, Any]:
    """The task of a hook, as the policy of an execution stores it."""
    item = task.defaults.item(task.name, b"", None, limits=task.limit_names.limits(task.defaults, are_stored=False))
    assert isinstance(item.policy, FrozenPolicy)
    found: dict[str, Any] = {
        "kind": item.execution_kind,
        "lane": item.lane_id,
        "namespace": item.namespace,
        "priority": item.priority,
        "tags": dict(item.tags or {}),
        "capabilities": ",".join(item.policy.derived.required_capabilities),
        "policy": msgspec.json.decode(item.policy.text),
    }
    for name, span in (("delay_ms", item.delay_until), ("deadline_ms", item.execution_deadline_at)):
        if isinstance(span, timedelta):
            found[name] = -(-span // timedelta(milliseconds=1))
    return {name: value for name, value in found.items() if value}


def facts_as_arguments(payload: bytes, signature: Signature, codecs: Codecs) -> bytes:
    """The arguments of a hook's task as one JSON object, from the facts that the engine wrote."""
    try:
        facts = msgspec.json.decode(payload)
        if facts.get("type") == "failure":
            reason = facts.pop("reason") or ""
            kind, message, trace = parse_failure(codecs.open_text(reason, UUID(facts["execution_id"])))
            facts |= {"error_type": kind, "message": message, "traceback": trace}
        known: Failure | Escalation = msgspec.convert(facts, Failure | Escalation)
    except (msgspec.MsgspecError, KeyError, ValueError, AttributeError, TypeError):
        raise CannotDecode("these are not the facts of a hook", what="arguments") from None
    return ENCODER.encode({signature.parameters[0].name: known} if signature.parameters else {})
