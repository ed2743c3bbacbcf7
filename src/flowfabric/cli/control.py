"""`flowfabric cancel`, `fail`, `unblock`, `replay`, `fork`, `priority`: change executions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli import _bulk, _output
from flowfabric.cli._database import ask, missing, near, resolve
from flowfabric.cli._filters import Filter, filtered
from flowfabric.cli._loading import load_app
from flowfabric.cli._options import Dsn, Id, Ids, Json, Yes, login_name
from flowfabric.cli._pages import PAGE
from flowfabric.errors import InvalidInput, NotFound, Unavailable
from flowfabric.values.lease import Operator

if TYPE_CHECKING:
    from flowfabric.app.app import App
    from flowfabric.engine import Engine
    from flowfabric.values.child import Child
    from flowfabric.values.ids import ExecutionId

_NAMED = 10  # failed children


@filtered
def cancel(
    executions: Ids = None,
    *,
    wanted: Filter,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="The reason, stored with the execution.")
    ] = "cancelled by an operator",
    keep_children: Annotated[
        bool, typer.Option("--keep-children", help="Do not cancel the tasks and flows that they submitted.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Cancel executions: the ones named, or all that match a filter and have not ended.

    Tasks and flows that they submitted, and theirs, are cancelled with them.
    """
    from flowfabric.values.attempt import Cancelled  # noqa: PLC0415
    from flowfabric.values.state import State  # noqa: PLC0415

    if wanted:
        wanted = wanted.or_states([one for one in State if not one.is_terminal])

    below = {"children": 0}

    async def what(engine: Engine, targets: Sequence[ExecutionId]) -> Sequence[Any]:
        done = await engine.cancel_many(targets, reason, keep_children=keep_children)
        for one in done:
            # Duties do this too; here it is done even if no worker runs.
            if isinstance(one, Cancelled) and one.has_children:
                below["children"] += await _cancel_below(engine, one.execution_id)
        return done

    _bulk.change(
        executions, wanted, what, verb="cancel", participle="cancelled", yes=yes, json=json, dsn=dsn, also=below
    )


async def _cancel_below(engine: Engine, parent: ExecutionId) -> int:
    cancelled = 0
    while True:
        done = await engine.cancel_children(parent)
        cancelled += done.cancelled
        if not done.more:
            return cancelled


def fail(
    execution: Id,
    reason: Annotated[
        str, typer.Option("--reason", "-r", metavar="TEXT", help="The reason, stored with the execution.")
    ] = "failed by an operator",
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Fail for good an execution that runs, or that waits because its code changed.

    It is not retried; `replay` runs it again. Its hooks and its flow see a failure. Use `cancel` for anything else that
    has not ended.
    """

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        await engine.fail(Operator(target), reason, failure_class="permanent", category="operator")
        _done(target, "failed", json=json)

    ask(dsn, work)


def unblock(execution: Id, json: Json = False, dsn: Dsn = None) -> None:
    """Let workers claim at once an execution that is held back, for example because its code changed."""

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        await engine.unblock_execution(target)
        _done(target, "unblocked", json=json)

    ask(dsn, work)


def _done(target: ExecutionId, participle: str, *, json: bool) -> None:
    if json:
        _output.document({"execution_id": target, participle: True})
    else:
        _output.say(f"{target} {participle}")


@filtered
def replay(
    executions: Ids = None,
    *,
    wanted: Filter,
    reason: Annotated[
        str | None,
        typer.Option("--reason", "-r", metavar="TEXT", help="The reason, stored with the attempt.", show_default=False),
    ] = None,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Run ended executions again: the ones named, or all that match a filter and failed or expired.

    With --state also completed, cancelled or skipped ones. Asks before it runs one again that completed, or that has a
    failed child: a parent reads how its children ended, so replay the child first.
    """
    from flowfabric.values.state import State  # noqa: PLC0415

    if wanted:
        # Cancelled ones were cancelled on purpose.
        wanted = wanted.or_states([State.FAILED, State.EXPIRED])

    async def what(engine: Engine, targets: Sequence[ExecutionId]) -> Sequence[Any]:
        return await engine.replay_many(targets, reason=reason, requested_by=login_name())

    async def doubt(engine: Engine, targets: Sequence[ExecutionId]) -> str:
        outcomes = await engine.read_outcomes(targets)
        done = sum(one.state is State.COMPLETED for one in outcomes.values())
        failed = {name for name, one in outcomes.items() if one.state in (State.FAILED, State.EXPIRED)}
        words = "it has" if len(targets) == 1 else f"{done} of {len(targets)} have"
        if done:
            return f"{words} completed already: run again what succeeded?"
        return await _failed_children(engine, [one for one in targets if one in failed])

    _bulk.change(
        executions, wanted, what, verb="replay", participle="replayed", yes=yes, json=json, dsn=dsn, doubt=doubt
    )


async def _failed_children(engine: Engine, targets: Sequence[ExecutionId]) -> str:
    """The question about parents whose failed children are not replayed with them; empty if there are none."""
    failed: list[Child] = []
    too = set(targets)
    for start in range(0, len(targets), PAGE):
        children = await engine.list_children(targets[start : start + PAGE], limit=10_000)
        failed += [one for one in children if one.state in ("failed", "expired") and one.id not in too]
    if not failed:
        return ""
    for one in failed[:_NAMED]:
        command = "flowfabric flow replay" if one.kind == "flow" else "flowfabric replay"
        what = "flow" if one.kind == "flow" else "child"
        _output.note(f"its {what} {_output.printable(one.name)} {one.state}: `{command} {one.id}` runs it again")
    words = "a child failed and stays" if len(failed) == 1 else f"{len(failed):,} children failed and stay"
    return f"{words} failed, so the parent may fail again: replay the parent alone?"


def fork(
    execution: Id,
    before: Annotated[
        str | None,
        typer.Option(
            "--before",
            metavar="STEP",
            help="Keep the steps recorded before this one, for example 'draft #2', as in `show`. Default: all.",
            show_default=False,
        ),
    ] = None,
    use: Annotated[
        int, typer.Option("--use", metavar="N", help="Which use of that name in the handler; 1 is the first.", min=1)
    ] = 1,
    payload: Annotated[
        str | None,
        typer.Option(
            "--payload",
            metavar="JSON",
            help="Arguments to replace, as a JSON object by name; the others stay. Default: none.",
            show_default=False,
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="PKG.MOD:APP",
            help="Check --payload with the task of this app, and write it with the app's codecs.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Start a new execution that has the steps recorded before one, and runs the rest.

    The other one is not changed. Results of children are kept; waits are asked again. Without --app, --payload replaces
    only arguments that the execution was submitted with: others are known to the code of the task alone.
    """
    if before is None and use > 1:
        raise InvalidInput("without --before", field="--use", allowed="together with --before")
    step = None if before is None else before + (f" #{use}" if use > 1 else "")
    loaded = None if app is None else load_app(app)
    if loaded is not None and loaded.codecs.binds:
        raise Unavailable("fork", "the app's codecs bind recorded steps to their execution")

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        sealed: tuple[bytes | None, str | None] = (None, None)
        try:
            if payload is not None:
                sealed = await _replaced(engine, target, _object(payload), loaded)
            made = await engine.fork_execution(
                target,
                before_step=None if before is None else (before, use - 1),
                payload=sealed[0],
                payload_encoding=sealed[1],
                creator_identity=login_name() or "",
            )
        except NotFound:
            raise await missing(engine, target) from None
        except InvalidInput as error:
            if error.field != "before_step":
                raise
            raise InvalidInput(error.problem, field="--before", allowed=error.allowed) from None
        if json:
            _output.document({"execution_id": made, "forked_from": target, "forked_before": step})
        else:
            _output.say(f"{made} forks {target}" + ("" if step is None else f" before {step}"))

    ask(dsn, work)


async def _replaced(
    engine: Engine, target: ExecutionId, given: dict[str, Any], app: App | None
) -> tuple[bytes, str | None]:
    """The arguments of an execution with some replaced, and their encoding."""
    import msgspec  # noqa: PLC0415

    from flowfabric.client.node_arguments import by_name  # noqa: PLC0415

    try:
        context = await engine.read_execution_context(target)
    except InvalidInput:
        raise NotFound("execution", target) from None
    stored, encoding = context.input_payload, context.payload_encoding
    if app is not None:
        stored, encoding = app.codecs.open(stored, encoding, target), None
    found = by_name(stored, encoding)
    is_known, known = found is not None, found or {}
    data = msgspec.json.encode({**known, **given})
    if app is None:
        for name in given.keys() - known.keys():
            raise _unknown(name, known, is_known=is_known)
        return data, None
    task = app.find_task(context.execution_kind)
    if task is None:
        raise InvalidInput(f"the app has no task {context.execution_kind}", field="--app", allowed="its app")
    from flowfabric.contracts.codecs import CannotDecode  # noqa: PLC0415

    try:
        task.signature.decode(data)
    except CannotDecode as error:
        raise InvalidInput(str(error), field="--payload", allowed="arguments that fit the task") from None
    return app.codecs.seal(data, None)


def _unknown(name: str, known: Iterable[str], *, is_known: bool) -> InvalidInput:
    """Without the app nothing says whether the task has an argument of this name."""
    if not is_known:
        problem = "the arguments of this execution can be read with its app only"
        return InvalidInput(problem, field="--payload", allowed="together with --app")
    hint = near(name, known)
    problem = f"the execution was submitted without {_output.printable(name)}" + (f"; {hint}" if hint else "")
    names = ", ".join(sorted(known))
    return InvalidInput(problem, field="--payload", allowed=f"{names}, or others with --app" if names else "--app too")


def _object(text: str) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    try:
        found = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidInput(f"not JSON: {error}", field="--payload", allowed="a JSON object of arguments") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"got {text[:40]!r}", field="--payload", allowed="a JSON object of arguments")
    return found


def priority(
    execution: Id,
    rank: Annotated[
        int,
        typer.Argument(metavar="PRIORITY", help="From 0 to 9000; workers claim higher ones first.", show_default=False),
    ],
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Change the priority of an execution that waits for a worker."""

    async def work(engine: Engine) -> None:
        target = await resolve(engine, execution)
        try:
            await engine.change_priority(target, rank)
        except NotFound:
            raise await missing(engine, target) from None
        found = await engine.read_execution(target)
        now = rank if found is None else found.priority
        if json:
            _output.document({"execution_id": target, "priority": now})
        else:
            _output.say(f"{target} has priority {now}")

    ask(dsn, work)
