"""Repeated requests: the answer to a request with an `Idempotency-Key` is kept for 24 hours and given again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from flowfabric.engine.acting import Actor
from flowfabric.errors import FlowFabricError
from flowfabric.server import audit
from flowfabric.server.answers import Finished
from flowfabric.server.call import Call
from flowfabric.server.operation import Repeats
from flowfabric.server.problems import Problem
from flowfabric.values.kept_answer import AnswerKey, KeptAnswer, Repeat

_REPEATED: Final = (b"idempotency-replayed", b"true")
_PATIENCE = 5.0  # seconds that a request which failed or was cut off waits until its key may be used again


async def once(
    call: Call,
    data: bytes,
    request_id: str,
    work: Callable[[Actor], Awaitable[Finished]],
    refused: Callable[[Exception], Finished],
) -> Finished:
    """Answer a request with an idempotency key: by `work`, in one transaction with its answer, or with the answer kept.

    A refusal is kept like any answer, unless a repeat may have another result: those from 500 on, 429, and 412, after
    which a caller reads again and repeats the request with the current tag.
    """
    key = AnswerKey(
        key_id=call.caller.key_id or "",
        operation=call.operation.name,
        idempotency_key=call.idempotency_key or "",
        holder=uuid.uuid4(),
    )
    earlier = await _begin(call, key, _digest(call, data))
    match earlier.repeat:
        case Repeat.DONE if earlier.status is not None:
            headers = [(name.encode(), value.encode()) for name, value in earlier.headers.items()]
            return Finished(earlier.status, [*headers, _REPEATED], earlier.body)
        case Repeat.DONE:
            raise Problem(409, "repeated_secret", "the answer had a secret, which is shown once; make a new one")
        case Repeat.UNDER_WAY:
            raise Problem(409, "request_in_progress", "a request with this Idempotency-Key is still under way")
        case Repeat.OTHER_REQUEST:
            raise Problem(422, "idempotency_key_reused", "the Idempotency-Key was used for another request")
    is_secret = call.operation.repeats is Repeats.SECRET

    async def keep(finished: Finished, *, secret: bool) -> None:
        await call.engine.finish_answer(
            key,
            status=None if secret else finished.status,
            headers={name.decode(): value.decode() for name, value in finished.headers},
            body=finished.body,
        )

    async def kept_work(actor: Actor) -> Finished:
        try:
            finished = await work(actor)
        except (FlowFabricError, Problem) as error:
            answer = refused(error)
            is_final = answer.status < 500 and answer.status not in (412, 429)
            if is_final and not is_secret and not call.engine.will_roll_back:
                await keep(answer, secret=False)
            raise
        await keep(finished, secret=is_secret)
        return finished

    try:
        return await audit.acting(call, request_id, kept_work)
    except BaseException:
        # An answer that was kept stays, even if its commit is still under way: this waits for it.
        await _for_a_while(call, _forget(call, key))
        raise


async def _begin(call: Call, key: AnswerKey, digest: bytes) -> KeptAnswer:
    begun = asyncio.ensure_future(call.service.engine.begin_answer(key, digest))
    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        # The database may store it all the same: a request that is cut off here must not keep its key in use.
        await _for_a_while(call, _forget(call, key, begun))
        raise


async def _forget(call: Call, key: AnswerKey, begun: asyncio.Future[KeptAnswer] | None = None) -> None:
    with contextlib.suppress(FlowFabricError):
        if begun is not None:
            await begun
        await call.service.engine.forget_answer(key)


async def _for_a_while(call: Call, work: Coroutine[Any, Any, None]) -> None:
    """Wait for this, but not as long as a database may hang: it continues without the request."""
    task = asyncio.ensure_future(work)
    call.service.leaving.add(task)
    task.add_done_callback(call.service.leaving.discard)
    await asyncio.wait([task], timeout=_PATIENCE)


def _digest(call: Call, data: bytes) -> bytes:
    scope = call.scope
    asked = hashlib.sha256()
    for part in (
        scope["method"].encode(),
        scope.get("raw_path") or scope["path"].encode(),
        scope["query_string"],
        data,
    ):
        asked.update(len(part).to_bytes(8, "big") + part)
    return asked.digest()
