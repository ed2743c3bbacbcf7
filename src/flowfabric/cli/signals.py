"""`flowfabric approve`, `reject`, `signal`, `resume`: what people tell an execution that waits."""

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
    from flowfabric.app.app import App
    from flowfabric.client import AsyncClient
    from flowfabric.engine import Engine
    from flowfabric.values.ids import ExecutionId
    from flowfabric.values.signal import Accepted, DuplicateSignal

    Send = Callable[[AsyncClient, ExecutionId], Awaitable[Accepted | DuplicateSignal]]

WaitingId = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The execution: its id, or the uuid in it.",
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
        help="Which waitpoint. Needed where it waits at several.",
        autocompletion=_completion.waitpoint_keys,
        show_default=False,
    ),
]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="Who says so. Default: the login name.", show_default=False),
]
_MOST_BYTES = 65_536  # of a payload
_SATISFIED = "resume_condition_satisfied"
_BUFFERED = "buffered_for_pending_waitpoint"


def approve(execution: WaitingId, key: Key = None, by: By = None, json: Json = False, dsn: Dsn = None) -> None:
    """Approve: send an execution that waits the signal `approved`. The same person's second one changes nothing."""
    who = _who(by)
    _send(execution, key, "approved", lambda client, target: client.approve(target, key, by=who), json=json, dsn=dsn)


def reject(execution: WaitingId, key: Key = None, by: By = None, json: Json = False, dsn: Dsn = None) -> None:
    """Reject: send an execution that waits the signal `rejected`. What that means is for its task to say."""
    who = _who(by)
    _send(execution, key, "rejected", lambda client, target: client.reject(target, key, by=who), json=json, dsn=dsn)


def signal(
    execution: WaitingId,
    key: Key = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The signal's name.")] = "signal",
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload",
            "-p",
            metavar="JSON",
            help="What it carries: JSON, @FILE with JSON, or - for standard input.",
            show_default=False,
        ),
    ] = None,
    by: By = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="The same key again at the same waitpoint is the same signal, for a day.",
            show_default=False,
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app", metavar="PKG.MOD:APP", help="Seal the payload with the codecs of this app.", show_default=False
        ),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Send an execution that waits a signal, as an operator. Whoever may use the database needs no token."""
    who = _who(by)
    value = None if payload is None else _payload(payload)
    loaded = None if app is None else load_app(app)

    def send(client: AsyncClient, target: ExecutionId) -> Awaitable[Accepted | DuplicateSignal]:
        # The source of approvals, so that one person does not count as two senders.
        return client.signal(
            target, key, name, value, source_type="operator", source_identity=who, idempotency_key=idempotency_key
        )

    _send(execution, key, name, send, app=loaded, json=json, dsn=dsn)


def resume(
    execution: WaitingId,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="DURATION", help="Not before so much time has passed.", show_default=False),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Resume a suspended execution whatever it waits for. Its wait ends without a signal."""
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
            "nobody" if by is not None else "the login name is not known", field="--by", allowed="a name"
        )
    return who


def _payload(text: str) -> Any:
    """The value that `--payload` stands for."""
    # White space may be too much for the engine and none of ours to count.
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
        raise InvalidInput(words, field="--payload", allowed="""JSON (a text is '"text"'), @FILE or -""") from None


def _send(
    execution: str, key: str | None, name: str, send: Send, *, app: App | None = None, json: bool, dsn: str | None
) -> None:
    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        client = _waiting.client_of(engine, app)
        async with refused_as(engine, target, key):
            answer = await send(client, target)
        if json:
            _output.document(_as_json(target, name, answer))
        else:
            await _tell(client, target, name, answer)

    ask(dsn, work)


def _as_json(target: ExecutionId, name: str, answer: Accepted | DuplicateSignal) -> dict[str, Any]:
    from flowfabric.values.signal import DuplicateSignal  # noqa: PLC0415

    fields = {"execution_id": target, "signal_name": name}
    if isinstance(answer, DuplicateSignal):
        return {**fields, "signal_id": answer.existing_signal_id, "effect": "deduped", "match_detail": None}
    return {**fields, "signal_id": answer.signal_id, "effect": answer.effect, "match_detail": answer.match_detail}


async def _tell(client: AsyncClient, target: ExecutionId, name: str, answer: Accepted | DuplicateSignal) -> None:
    from flowfabric.values.signal import DuplicateSignal  # noqa: PLC0415

    if isinstance(answer, DuplicateSignal):
        _output.say(f"{target} has it already: nothing changed")
    elif answer.effect == _SATISFIED:
        _output.say(f"{target} goes on")
    elif answer.effect == _BUFFERED:
        _output.say(f"{target} has it, for when it waits there")
    else:
        _output.say(f"{target} has it and waits on")
        if note := await _why_on(client, target, name, answer.match_detail):
            _output.note(_output.printable(note))


async def _why_on(client: AsyncClient, target: ExecutionId, name: str, detail: str) -> str:
    suspension = await client.engine.read_suspension(target)
    if suspension is None or suspension.closed_at is not None:
        return ""  # somebody else was quick
    wanted = f"it waits for {_waiting.condition(suspension.resume_condition)}"
    match detail:
        case "matcher_failed":
            return f"a signal {name} is not what it waits for: {wanted}"
        case "not_in_condition":
            return f"no signal there resumes it: {wanted}"
        case "duplicate_satisfier":
            return f"it adds nothing to what was there: {wanted}"
        case _:
            return wanted


# Refusals that people can act on


@contextlib.asynccontextmanager
async def refused_as(engine: Engine, target: ExecutionId, key: str | None) -> AsyncIterator[None]:
    """Say about a refusal what a person needs to know: the keys that exist, or how the execution stands."""
    try:
        yield
    except InvalidInput as error:
        if error.field != "key":
            raise
        raise InvalidInput(error.problem, field="--key", allowed=_output.printable(error.allowed)) from None
    except (NotFound, StateError, ValidationFailed) as error:
        if isinstance(error, ValidationFailed) and error.kind != "invalid_token":
            raise
        raise await _explained(engine, target, key, error) from None


async def _explained(engine: Engine, target: ExecutionId, key: str | None, error: FlowFabricError) -> FlowFabricError:
    execution = await engine.read_execution(target)
    if execution is None:
        return await missing(engine, target)
    state = execution.public_state
    if error.kind == "execution_not_suspended":
        return StateError(error.kind, f"{target} is {state}", execution_id=target)
    found = await _waiting.client_of(engine).waitpoints_of(target)
    keys = sorted({one.waitpoint_key for one in found})
    if isinstance(error, NotFound) and keys:
        return NotFound("waitpoint", key, detail=f"{target} has {', '.join(keys[:10])}")
    if keys:
        kids = await engine.list_waitpoint_hmac_kids()
        good = {kids.current_kid, *(one.kid for one in kids.verifying)}
        if any(one.token_kid in good for one in found if one.waitpoint_key == key or key is None):
            return error
        detail = "the key that signed its token is out of use; `flowfabric approve` and `resume` need none"
        return StateError("target_not_signalable", detail, execution_id=target)
    words = f"{target} is {state} and waits for no signal"
    last = await engine.read_suspension(target)
    if last is not None and last.closed_at is not None:
        words += f"; its last wait, at {', '.join(last.waitpoint_keys)}, ended at {_output.when(last.closed_at)}"
        words += f" ({last.close_reason})"
    return StateError("target_not_signalable", words, execution_id=target)
