"""`flowfabric wait`: wait until an execution ends, and print its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _output
from flowfabric.cli._database import ask, missing, resolve
from flowfabric.cli._loading import AppOption, load_app
from flowfabric.cli._options import Dsn, Id, Json, parse_duration
from flowfabric.cli._program import NO, TIMEOUT, exit_with
from flowfabric.contracts import json_form
from flowfabric.values.state import State

if TYPE_CHECKING:
    from flowfabric.contracts.codecs import Codecs
    from flowfabric.engine import Engine
    from flowfabric.values.execution import Outcome
    from flowfabric.values.ids import ExecutionId

# How people say it.
_ENDED = {State.CANCELLED: "was cancelled", State.SKIPPED: "was skipped"}
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout", metavar="DURATION", help="Wait at most this long (30s, 5m), then exit with 3.", show_default=False
    ),
]


def wait(execution: Id, timeout: Timeout = None, app: AppOption = None, json: Json = False, dsn: Dsn = None) -> None:
    """Wait until an execution ends and print its result. Exits with 1 unless it completed, 3 on a timeout."""
    seconds = None if timeout is None else parse_duration(timeout, "--timeout").total_seconds()
    codecs = None if app is None else load_app(app).codecs

    async def work(engine: Engine) -> int:
        target = await resolve(engine, execution)
        return await until_ended(engine, target, seconds, codecs, as_json=json)

    exit_with(ask(dsn, work, notifications=True))


async def until_ended(
    engine: Engine, target: ExecutionId, seconds: float | None, codecs: Codecs | None, *, as_json: bool
) -> int:
    """Wait and print the result or the failure; returns the exit code."""
    from flowfabric.client.outcomes import Outcomes  # noqa: PLC0415

    outcomes = Outcomes(engine, lambda line: _output.note(f"flowfabric: {_output.printable(line)}"))
    try:
        outcome = await outcomes.wait(target, seconds)
    except TimeoutError:
        state = await engine.read_execution_state(target)
        if as_json:
            _output.document({"execution_id": target, "public_state": state, "is_ended": False})
        else:
            _output.note(f"flowfabric: {target} did not end in time; it is {state}")
        return TIMEOUT
    finally:
        await outcomes.close()
    if outcome.state is None:
        raise await missing(engine, target)
    if as_json:
        _output.document(_as_json(target, outcome, codecs))
    elif outcome.state is State.COMPLETED:
        if outcome.result is not None:
            text = _output.payload_text(outcome.result, outcome.result_encoding, codecs, target)
            _output.say(_output.printable(text))
            if codecs is None and "+" in (outcome.result_encoding or ""):
                _output.note("(the result is encoded; give --app PKG.MOD:APP to read it)")
    else:
        tell_unsuccessful(target, outcome, codecs)
    return 0 if outcome.state is State.COMPLETED else NO


def tell_unsuccessful(target: ExecutionId, outcome: Outcome, codecs: Codecs | None) -> None:
    """Say that an execution did not complete, and why."""
    why = _output.failure_line(_output.opened(outcome.failure_reason, codecs, target) or outcome.cancellation_reason)
    how = str(outcome.state) if outcome.state is None else _ENDED.get(outcome.state, outcome.state)
    _output.note(f"flowfabric: {target} {how}" + (f": {_output.printable(why)}" if why else ""))


def _as_json(target: ExecutionId, outcome: Outcome, codecs: Codecs | None) -> dict[str, Any]:
    return {
        "execution_id": target,
        "public_state": outcome.state,
        "is_ended": True,
        "result": json_form.payload_or_problem(outcome.result, outcome.result_encoding, codecs, target),
        "failure_reason": _output.opened(outcome.failure_reason, codecs, target) or None,
        "failure_category": outcome.failure_category,
        "cancellation_reason": outcome.cancellation_reason,
    }
