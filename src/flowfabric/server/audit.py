"""Operations in the audit log: one transaction with the row, whose events carry the caller's name."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from flowfabric.engine.acting import Actor, outcome_of
from flowfabric.errors import FlowFabricError, RetriesExhausted
from flowfabric.server.call import Call, Caller
from flowfabric.server.operation import Operation
from flowfabric.server.problems import Problem
from flowfabric.server.service import Service

log = logging.getLogger("flowfabric.server")
_Result = TypeVar("_Result")
_TRIES: Final = 3
LINK: Final = "link"  # who acts if the operation needs no key


async def acting(call: Call, request_id: str, work: Callable[[Actor], Awaitable[_Result]]) -> _Result:
    """Run `work` with `call.engine` bound to a transaction; begins again after a deadlock."""
    operation, service = call.operation, call.service
    actor = _actor(operation, call.caller, call.path.values(), request_id)
    engine = service.owner if operation.by_owner and service.owner is not None else service.engine
    tries = _TRIES
    while True:
        tries -= 1
        try:
            async with engine.acting(actor) as call.engine:
                try:
                    return await work(actor)
                except (FlowFabricError, Problem) as error:
                    # Guesses are no decisions: they leave no row.
                    actor.is_audited = actor.is_audited and not (operation.scope is None and is_unknown(error))
                    raise
        except RetriesExhausted as error:
            if tries == 0:
                await engine.write_operator_audit(actor, outcome_of(error))
                raise
        finally:
            call.engine = service.engine


async def refuse(service: Service, operation: Operation, caller: Caller, path: Iterable[str], request_id: str) -> None:
    """Write the row of a request whose API key lacks the scope. Without the database it is refused all the same."""
    try:
        await service.engine.write_operator_audit(_actor(operation, caller, path, request_id), "forbidden")
    except FlowFabricError as error:
        log.warning("the audit log has no row of the refused %s by %s: %s", operation.name, caller.name, error)


def _actor(operation: Operation, caller: Caller, path: Iterable[object], request_id: str) -> Actor:
    return Actor(
        name=caller.name or LINK,
        operation=operation.name,
        key_id=caller.key_id,
        address=caller.address or None,
        # The path of an operation without a scope is a link, which is a secret.
        target=None if operation.scope is None else ", ".join(map(str, path)) or None,
        request_id=request_id,
        is_audited=operation.is_audited,
    )


def is_unknown(error: FlowFabricError | Problem) -> bool:
    """Whether it says that nothing of this name exists, or that a token is wrong."""
    return error.kind in ("not_found", "invalid_token", "waitpoint_not_found")
