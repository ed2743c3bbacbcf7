"""Submissions over HTTP: the record that clients send, and the execution that it creates."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from flowfabric.client.limits import learn
from flowfabric.client.submission import Submission
from flowfabric.contracts.codecs import CannotDecode
from flowfabric.contracts.policy_form import check_members, stored_policy
from flowfabric.errors import InvalidInput
from flowfabric.server import problems
from flowfabric.server.call import Call
from flowfabric.server.members import Payload
from flowfabric.server.namespace import given_namespace, own_hooks
from flowfabric.server.operation import Instant
from flowfabric.server.problems import FieldError, Problem
from flowfabric.server.tracing import with_trace
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import PARTITION_VALUES, ExecutionId, FlowId, mint_execution_id
from flowfabric.values.spending import NO_LIMITS

_encode = msgspec.json.Encoder().encode
_FARTHEST = 10**10  # seconds: further from now than any time that the database can hold


class SubmitExecution(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task to run: `execution_kind` is its name, `arguments` has its arguments by the names of its parameters.

    `input` replaces the arguments by bytes of your own. A time may be given as an instant or in seconds from now.
    `policy` is the whole policy of the execution (retries, timeouts, limits); without it the server's app, if it knows
    the task, applies the task's options. Its members are objects: `{"retry_policy": {"max_retries": 3, "backoff":
    {"type": "exponential", "initial_delay_seconds": 1, "max_delay_seconds": 60, "multiplier": 2}}, "timeout_policy":
    {"attempt_timeout_seconds": 300}, "routing_requirements": {"required_capabilities": ["gpu"]}, "budget_ids": [],
    "quota_policy_ids": []}`.
    """

    execution_kind: str
    arguments: dict[str, Any] | None = None
    input: Payload | None = None
    lane_id: str | None = None
    namespace: str | None = None
    priority: int | None = None
    idempotency_key: str | None = None
    tags: dict[str, str] | None = None
    policy: dict[str, Any] | None = None
    delay_until: Instant | None = None
    delay_seconds: float | None = None
    execution_deadline_at: Instant | None = None
    execution_deadline_seconds: float | None = None
    execution_id: ExecutionId | None = None
    flow_id: FlowId | None = None


async def learn_limits(call: Call, kinds: Iterable[str]) -> None:
    """Look up the limits that the options of tasks name and this process does not know yet. Before `new_execution`."""
    app = call.service.app
    if app is not None:
        tasks = [task for kind in set(kinds) if (task := app.find_task(kind)) is not None]
        await learn(call.engine, [Submission(task=one, options=one.defaults) for one in tasks])


def new_execution(call: Call, given: SubmitExecution, *, in_batch: bool = False, nested: bool = False) -> NewExecution:
    """What a submission creates; refused with the name of the member that is wrong.

    `nested`: it is a node of a flow, to which hooks of the app do not apply.
    """
    namespace = call.namespace
    if in_batch:
        namespace = given_namespace(call.caller, given.namespace, pointer="/namespace")
    app = call.service.app
    task = None if app is None else app.find_task(given.execution_kind)
    execution_id = given.execution_id
    encoding: str | None = None
    if given.input is not None:
        if given.arguments is not None:
            raise InvalidInput("given with arguments", field="input", allowed="one of them")
        payload, encoding = given.input.read()
    else:
        payload = _encode(given.arguments) if given.arguments else b"{}"
    key = given.idempotency_key if in_batch else _key(call, given)
    made = None
    if task is not None:
        hooks = task.hooks(task.defaults, nested=nested)
        named = NO_LIMITS  # a policy of the request has its own
        if given.policy is None:
            tags = task.defaults.tags if given.tags is None else given.tags
            named = task.limit_names.limits(task.defaults.replace(tags=tags))
        made = task.defaults.item(task.name, b"", None, hooks=hooks, limits=named)
        if namespace is not None:
            made = msgspec.structs.replace(made, namespace=namespace)
        elif call.caller.namespaces is not None and made.namespace not in call.caller.namespaces:
            raise problems.not_found("namespace", made.namespace)
        if given.input is None:
            check_arguments(task.signature, payload)
            if task.codecs.binds and execution_id is None:
                execution_id = mint_execution_id(
                    namespace=made.namespace, idempotency_key=key, flow_id=given.flow_id, count=PARTITION_VALUES
                )
            payload, encoding = task.codecs.seal(payload, execution_id if task.codecs.binds else None)
    members: dict[str, Any] = {
        "input_payload": payload,
        "payload_encoding": encoding,
        "creator_identity": "" if call.caller.key_id is None else call.caller.name,
        "idempotency_key": key,
        "execution_id": execution_id,
        "flow_id": given.flow_id,
    }
    tags = given.tags if given.tags is not None or made is None else made.tags
    if (tags := with_trace(tags)) is not None:
        members["tags"] = tags
    if given.lane_id is not None:
        members["lane_id"] = given.lane_id
    if given.priority is not None:
        members["priority"] = given.priority
    if given.policy is not None:
        check_members(given.policy)
        members["policy"] = stored_policy(own_hooks(call.caller, given.policy, namespace))
    delay = _moment(given.delay_until, given.delay_seconds, "delay_seconds")
    if delay is not None:
        members["delay_until"] = delay
    deadline = _moment(given.execution_deadline_at, given.execution_deadline_seconds, "execution_deadline_seconds")
    if deadline is not None:
        members["execution_deadline_at"] = deadline
    if made is None:
        return NewExecution(execution_kind=given.execution_kind, namespace=namespace or "", **members)
    return msgspec.structs.replace(made, **members)


def _key(call: Call, given: SubmitExecution) -> str | None:
    """The idempotency key: the header and the member are the same."""
    key, header = given.idempotency_key, call.idempotency_key
    if key is not None and header is not None and key != header:
        raise InvalidInput("differs from the header Idempotency-Key", field="idempotency_key", allowed="one of them")
    return header if key is None else key


def check_arguments(signature: Any, payload: bytes) -> None:
    """Refuse arguments that do not fit the task, each by its name."""
    try:
        signature.decode(payload)
    except CannotDecode as error:
        first = error
    else:
        return
    raw = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    known = {one.name: one for one in signature.parameters}
    errors: list[FieldError] = []
    for name, value in raw.items():
        if name not in known:
            errors.append(_argument(name, f"{signature.name} takes no such argument", ", ".join(known) or "none"))
            continue
        try:
            known[name].type.decode(bytes(value), what=name)
        except CannotDecode as error:
            errors.append(_argument(name, error.problem, known[name].annotation))
    errors += [
        _argument(name, "missing", one.annotation) for name, one in known.items() if one.required and name not in raw
    ]
    detail = f"{errors[0].pointer}: {errors[0].detail}" if errors else first.problem
    raise Problem(422, "invalid_request", detail, errors=errors)


def refuse_arguments(names: Iterable[str], known: Iterable[str]) -> NoReturn:
    """Refuse arguments that an execution was not submitted with, and whose task the server does not know."""
    allowed = ", ".join(sorted(known)) or "none: the server was started without the app"
    errors = [_argument(name, "the execution was submitted without it", allowed) for name in names]
    raise Problem(422, "invalid_request", f"{errors[0].pointer}: {errors[0].detail}", errors=errors)


def _argument(name: str, problem: str, allowed: str) -> FieldError:
    escaped = name.replace("~", "~0").replace("/", "~1")
    return FieldError(problem, pointer=f"/arguments/{escaped}", allowed=allowed)


def _moment(at: datetime | None, seconds: float | None, field: str) -> datetime | timedelta | None:
    if seconds is None:
        return at
    if at is not None:
        raise InvalidInput("given with a time", field=field, allowed="one of them")
    if not abs(seconds) <= _FARTHEST:
        raise InvalidInput(f"got {seconds:g}", field=field, allowed="a duration of at most about 300 years")
    return timedelta(seconds=seconds)
