"""The namespace that a request names, compared with those of its API key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from flowfabric.errors import NotFound
from flowfabric.server import problems
from flowfabric.server.call import Call, Caller
from flowfabric.server.operation import Within
from flowfabric.server.problems import FieldError, Problem
from flowfabric.values.budget import BudgetStatus
from flowfabric.values.checks import MAX_BATCH
from flowfabric.values.ids import BudgetId, ExecutionId, FlowId, parse_uuid

NAMESPACE: Final = "namespace"  # the type of the scope of a budget that belongs to one


def given_namespace(caller: Caller, given: str | None, *, pointer: str | None = None) -> str | None:
    """The namespace that holds; of a key with one namespace, that one. None: all of them, or the default one.

    `pointer` is where the body names it; None: the query does.
    """
    allowed = caller.namespaces
    if allowed is None:
        return given
    if given is None:
        if len(allowed) != 1:
            raise Problem(
                422,
                "invalid_request",
                "namespace: must be named, as the API key has several",
                errors=[
                    FieldError(
                        "missing",
                        pointer=pointer,
                        parameter="namespace" if pointer is None else None,
                        allowed=", ".join(allowed),
                    )
                ],
            )
        return allowed[0]
    if given not in allowed:
        raise problems.not_found("namespace", given)
    return given


async def check_namespace(call: Call) -> None:
    """Refuse a request of a key with namespaces that names something outside of them."""
    match call.operation.within:
        case Within.EXECUTION:
            await own_execution(call, call.path["execution_id"])
        case Within.FLOW:
            await check_flow(call, call.path["flow_id"])
        case Within.EVERY:
            raise Problem(403, "forbidden", "the operation concerns all namespaces, and the API key has only some")


async def check_flow(call: Call, flow_id: FlowId | None) -> None:
    """Refuse a flow of a namespace that the caller does not have, as an unknown one."""
    if flow_id is None or call.caller.namespaces is None:
        return
    if not (await call.engine.in_namespaces(call.caller.namespaces, [], [flow_id]))[0]:
        raise problems.not_found("flow", flow_id)


async def check_limits(call: Call, policies: Iterable[Mapping[str, Any] | None]) -> None:
    """Refuse policies that name limits outside the namespaces of the key: executions use them up, and wait for them.

    So do those that the hooks of a policy submit. Quotas belong to no namespace: the app, or an operator by a binding,
    lets executions of a namespace count in them.
    """
    if call.caller.namespaces is None:
        return
    for policy in policies:
        for named in (policy or {}, *(hook.get("policy") for hook in _hooks(policy or {}).values())):
            if isinstance(named, Mapping):
                await _check_limits(call, named)


async def _check_limits(call: Call, named: Mapping[str, Any]) -> None:
    for one in (*_listed(named.get("quota_policy_ids")), *_listed(named.get("quota_policy_id"))):
        raise problems.not_found("quota_policy", one)
    for one in _listed(named.get("budget_ids")):
        await own_budget(call, BudgetId(parse_uuid(one, "policy.budget_ids")))


def own_hooks(caller: Caller, policy: Mapping[str, Any], namespace: str | None) -> Mapping[str, Any]:
    """The policy of an execution in `namespace`: the hooks of a caller with namespaces submit to these only."""
    if caller.namespaces is None or not (hooks := _hooks(policy)):
        return policy
    placed = dict(policy["hooks"])
    for name, hook in hooks.items():
        into = namespace if hook.get("namespace") is None else hook["namespace"]
        if into not in caller.namespaces:
            raise problems.not_found("namespace", into)
        placed[name] = {**hook, "namespace": into}
    return {**policy, "hooks": placed}


def _hooks(policy: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The hooks of a policy that came as JSON."""
    hooks = policy.get("hooks")
    if not isinstance(hooks, Mapping):
        return {}
    return {name: hook for name, hook in hooks.items() if isinstance(hook, Mapping)}


def _listed(value: Any) -> Iterable[str]:
    """The ids that a member names; the engine refuses values that are not text."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


async def own_budget(call: Call, budget_id: BudgetId) -> BudgetStatus:
    """Read a budget; refuse one of another namespace, or of all, as unknown."""
    found = await call.engine.get_budget_status(budget_id)
    if not is_own_budget(call.caller, found):
        raise NotFound("budget", found.budget_id)
    return found


def is_own_budget(caller: Caller, found: BudgetStatus) -> bool:
    """Whether a budget belongs to a namespace of the caller."""
    allowed = caller.namespaces
    return allowed is None or (found.scope_type == NAMESPACE and found.scope_id in allowed)


async def own_execution(call: Call, execution_id: ExecutionId) -> None:
    """Refuse an execution of another namespace as unknown."""
    if not await own_executions(call, [execution_id]):
        raise problems.not_found("execution", execution_id)


async def own_executions(call: Call, execution_ids: Iterable[ExecutionId]) -> set[ExecutionId]:
    """Of some executions, those that the key may see; all of them for a key without namespaces."""
    asked = list(execution_ids)
    if call.caller.namespaces is None or not asked:
        return set(asked)
    own: set[ExecutionId] = set()
    for begin in range(0, len(asked), MAX_BATCH):
        some = asked[begin : begin + MAX_BATCH]
        known = await call.engine.in_namespaces(call.caller.namespaces, some)
        own.update(one for one, is_known in zip(some, known, strict=True) if is_known)
    return own
