"""Operations in the audit log: one transaction with the row, whose events carry the caller's name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from flowfabric.engine.acting import Actor, outcome_of
from flowfabric.errors import FlowFabricError, RetriesExhausted
from flowfabric.server.call import Call
from flowfabric.server.problems import Problem

_Result = TypeVar("_Result")
_TRIES: Final = 3
LINK: Final = "link"  # who acts if the operation needs no key


async def acting(call: Call, request_id: str, work: Callable[[Actor], Awaitable[_Result]]) -> _Result:
    """Run `work` with `call.engine` bound to a transaction; begins again after a deadlock."""
    operation, caller, service = call.operation, call.caller, call.service
    actor = Actor(
        name=caller.name or LINK,
        operation=operation.name,
        key_id=caller.key_id,
        address=caller.address or None,
        target=", ".join(str(value) for value in call.path.values()) or None,
        request_id=request_id,
        is_audited=operation.is_audited,
    )
    if operation.scope is None:
        actor.target = None  # the link is a secret
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


def is_unknown(error: FlowFabricError | Problem) -> bool:
    """Whether it says that nothing of this name exists, or that a token is wrong."""
    return error.kind in ("not_found", "invalid_token", "waitpoint_not_found")
