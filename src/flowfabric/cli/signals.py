"""`flowfabric approve`, `reject`, `signal`, `resume`: signal or resume an execution that waits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from flowfabric.cli import _completion, _output, _waiting
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._loading import load_app
from flowfabric.cli._options import Dsn, Json, login_name, parse_duration
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound, StateError, ValidationFailed

if TYPE_CHECKING:
    from flowfabric.client import AsyncClient
    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId
    from flowfabric.values.signal import Accepted, DuplicateSignal

    Send = Callable[[AsyncClient, ExecutionId], Awaitable[Accepted | DuplicateSignal]]

WaitingId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The execution: its id, or a unique end or beginning of it.",
        autocompletion=_completion.waiting,
        show_default=False,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        "-k",
        metavar="KEY",
        help="The waitpoint's key, needed if the execution has several waitpoints.",
        autocompletion=_completion.waitpoint_keys,
        show_default=False,
    ),
]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="Who decides. Default: the login name.", show_default=False),
]
Payload = Annotated[
    str | None,
    typer.Option(
        "--payload",
        "-p",
        metavar="JSON",
        help="The signal's payload: JSON, @FILE with JSON, or - for standard input.",
        show_default=False,
    ),
]
Codecs = Annotated[
    str | None,
    typer.Option(
        "--app", metavar="PKG.MOD:APP", help="Encode the payload with the codecs of this app.", show_default=False
    ),
]
_MOST_BYTES = 65_536  # of a payload
_SATISFIED = "resume_condition_satisfied"
_BUFFERED = "buffered_for_pending_waitpoint"


def approve(
    execution: WaitingId,
    key: Key = None,
    by: By = None,
    payload: Payload = None,
    app: Codecs = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Send the signal `approved` to an execution that waits. A second one from the same person changes nothing."""
    who, value = _who(by), _payload(payload)

    def send(client: AsyncClient, target: ExecutionId) -> Awaitable[Accepted | DuplicateSignal]:
        return client.approve(target, key, by=who, payload=value)

    _send(execution, key, "approved", send, app=app, json=json, dsn=dsn)


def reject(
    execution: WaitingId,
    key: Key = None,
    by: By = None,
    payload: Payload = None,
    reason: Annotated[
        str | None,
        typer.Option("--reason", metavar="TEXT", help="The field `reason` of the payload.", show_default=False),
    ] = None,
    app: Codecs = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Send the signal `rejected` to an execution that waits. Its task decides what that means."""
    who, value = _who(by), _payload(payload)

    def send(client: AsyncClient, target: ExecutionId) -> Awaitable[Accepted | DuplicateSignal]:
        return client.reject(target, key, by=who, payload=value, reason=reason)

    _send(execution, key, "rejected", send, app=app, json=json, dsn=dsn)


def signal(
    execution: WaitingId,
    key: Key = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The signal's name.")] = "signal",
    payload: Payload = None,
    by: By = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="For a day, the same key at the same waitpoint is the same signal.",
            show_default=False,
        ),
    ] = None,
    app: Codecs = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Send a signal to an execution that waits, as an operator. Access to the database is enough; no token needed."""
    who, value = _who(by), _payload(payload)

    def send(client: AsyncClient, target: ExecutionId) -> Awaitable[Accepted | DuplicateSignal]:
        # The same source type as for approvals, so that one person does not count as two senders.
        return client.signal(
            target, key, name, value, source_type="operator", source_identity=who, idempotency_key=idempotency_key
        )

    _send(execution, key, name, send, app=app, json=json, dsn=dsn)


def resume(
    execution: WaitingId,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="DURATION", help="Resume after this delay.", show_default=False),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Resume a suspended execution without a signal, whatever it waits for."""
    span = timedelta() if delay is None else parse_duration(delay, "--delay")

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        async with refused_as(engine, target, None):
            done = await engine.resume_execution(target, "operator", span)
        if json:
            _output.document(done)
        else:
            _output.say(f"{target} is {done.public_state}" + (f" for {_output.duration(span)}" if span else ""))

    ask(dsn, work)


def _who(by: str | None) -> str:
    who = login_name() if by is None else by
    if not who:
        raise InvalidInput(
            "got no name" if by is not None else "the login name is not known", field="--by", allowed="a name"
        )
    return who


def _payload(text: str | None) -> Any:
    """The value of `--payload`."""
    if text is None:
        return None
    # Generous: the engine counts the payload without its white space.
    most = _MOST_BYTES * 4
    if text == "-":
        data = sys.stdin.buffer.read(most + 1)
    elif text.startswith("@"):
        with Path(text[1:]).open("rb") as file:
            data = file.read(most + 1)
    else:
        data = text.encode(errors="surrogateescape")
    if len(data) > most:
        raise ValidationFailed("payload_too_large", f"--payload: {_MOST_BYTES} bytes are allowed")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        words = f"not JSON ({error})"
        raise InvalidInput(words, field="--payload", allowed="""JSON (a string is '"text"'), @FILE or -""") from None


def _send(
    execution: str, key: str | None, name: str, send: Send, *, app: str | None, json: bool, dsn: str | None
) -> None:
    loaded = None if app is None else load_app(app)

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        client = _waiting.client_of(engine, loaded)
        async with refused_as(engine, target, key):
            answer = await send(client, target)
        if json:
            _output.document(_as_json(target, name, answer))
        else:
            await _tell(client, target, key, name, answer)

    ask(dsn, work)


def _as_json(target: ExecutionId, name: str, answer: Accepted | DuplicateSignal) -> dict[str, Any]:
    from flowfabric.values.signal import DuplicateSignal  # noqa: PLC0415

    fields = {"execution_id": target, "signal_name": name}
    if isinstance(answer, DuplicateSignal):
        return {**fields, "signal_id": answer.existing_signal_id, "effect": "deduped", "match_detail": None}
    return {**fields, "signal_id": answer.signal_id, "effect": answer.effect, "match_detail": answer.match_detail}


async def _tell(
    client: AsyncClient, target: ExecutionId, key: str | None, name: str, answer: Accepted | DuplicateSignal
) -> None:
    from flowfabric.values.signal import DuplicateSignal  # noqa: PLC0415

    done = name if name in ("approved", "rejected") else "signalled"
    if isinstance(answer, DuplicateSignal):
        _output.say(f"{target} has this signal already; nothing changed")
    elif answer.effect == _SATISFIED:
        # Of several waits the handler settles this one and waits for the others.
        others = sorted({one.waitpoint_key for one in await client.waitpoints_of(target)} - {key})
        if others and key is not None:
            open_keys = ", ".join(map(_output.printable, others))
            _output.say(f"{done}; {target} continues, and still takes signals at {open_keys}")
        else:
            _output.say(f"{done}; {target} resumes")
    elif answer.effect == _BUFFERED:
        _output.say(f"{done}; {target} gets it when it waits there")
    else:
        _output.say(f"{done}; {target} still waits")
        if note := await _why_on(client, target, name, answer.match_detail):
            _output.note(_output.printable(note))


async def _why_on(client: AsyncClient, target: ExecutionId, name: str, detail: str) -> str:
    suspension = await client.engine.read_suspension(target)
    if suspension is None or suspension.closed_at is not None:
        return ""  # resumed meanwhile
    wanted = f"it waits for {_waiting.condition(suspension.resume_condition)}"
    match detail:
        case "matcher_failed":
            return f"a signal {name} does not resume it: {wanted}"
        case "not_in_condition":
            return f"no signal there resumes it: {wanted}"
        case "duplicate_satisfier":
            return f"it counts once with the earlier signal: {wanted}"
        case _:
            return wanted


# Refusals with a hint


@contextlib.asynccontextmanager
async def refused_as(engine: Engine, target: ExecutionId, key: str | None) -> AsyncIterator[None]:
    """Make a refusal helpful: name the keys that exist, or the state of the execution."""
    try:
        yield
    except InvalidInput as error:
        if error.field not in ("key", "reason"):
            raise
        allowed = _output.printable(error.allowed or "")
        raise InvalidInput(error.problem, field=f"--{error.field}", allowed=allowed) from None
    except (NotFound, StateError) as error:
        raise await _explained(engine, target, key, error) from None


async def _explained(engine: Engine, target: ExecutionId, key: str | None, error: FlowFabricError) -> FlowFabricError:
    execution = await engine.read_execution(target)
    if execution is None:
        return await missing(engine, target)
    state = execution.public_state
    if error.kind == "execution_not_suspended":
        return StateError(error.kind, f"{target} is {state}, so there is no wait to end", execution_id=target)
    keys = sorted({one.waitpoint_key for one in await _waiting.client_of(engine).waitpoints_of(target)})
    if isinstance(error, NotFound) and keys:
        return NotFound("waitpoint", key, detail=f"{target} has {', '.join(keys[:10])}")
    if keys:
        return error
    words = f"{target} is {state} and waits for no signal"
    last = await engine.read_suspension(target)
    if last is not None and last.closed_at is not None:
        words += f"; its last wait, at {', '.join(last.waitpoint_keys)}, ended at {_output.when(last.closed_at)}"
        words += f" ({last.close_reason})"
    return StateError("target_not_signalable", words, execution_id=target)
