"""The namespaces of a key: what a request may name, and what belongs to them.

Foreign and unknown get the same answer everywhere.
"""

from __future__ import annotations

from flowfabric.server import problems
from flowfabric.server.call import Call, Caller
from flowfabric.server.operation import Within
from flowfabric.server.problems import FieldError, Problem


async def check_namespace(call: Call, namespaces: tuple[str, ...]) -> None:
    """Refuse a request of a key with namespaces that names something outside of them."""
    match call.operation.within:
        case Within.EXECUTION:
            execution_id = call.path["execution_id"]
            if not (await call.service.engine.in_namespaces(namespaces, [execution_id]))[0]:
                raise problems.not_found("execution", execution_id)
        case Within.FLOW:
            flow_id = call.path["flow_id"]
            if not (await call.service.engine.in_namespaces(namespaces, [], [flow_id]))[0]:
                raise problems.not_found("flow", flow_id)
        case Within.EVERY:
            raise Problem(403, "forbidden", "the operation concerns all namespaces, and the API key has only some")


def given_namespace(caller: Caller, given: str | None) -> str | None:
    """The namespace that holds; of a key with one namespace, that one. None: all of them, or the default one."""
    allowed = caller.namespaces
    if allowed is None:
        return given
    if given is None:
        if len(allowed) != 1:
            raise Problem(
                422,
                "invalid_request",
                "namespace: must be named, as the API key has several",
                errors=[FieldError("missing", parameter="namespace", allowed=", ".join(allowed))],
            )
        return allowed[0]
    if given not in allowed:
        raise problems.not_found("namespace", given)
    return given
