"""How commands reach the database, and how they find the execution or flow that an id names."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit
from uuid import UUID

from flowfabric import settings
from flowfabric.cli._output import note, printable, when
from flowfabric.errors import ConnectionFailed, InvalidInput, NotFound
from flowfabric.values.found import FoundId, What
from flowfabric.values.ids import ExecutionId, FlowId, id_digits
from flowfabric.values.page import everything

if TYPE_CHECKING:
    from flowfabric.engine import Engine

_Answer = TypeVar("_Answer")
_CONNECTIONS = 8
_SILENT = 3.0  # seconds after which a command says what it waits for
_PATIENCE = 60.0  # seconds for the embedded server to start, which may have to recover
_WHOLE = 32
# How many are named if a part of an id fits several.
_CANDIDATES = 10
_SECRETS = ("password", "sslpassword")


def ask(dsn: str | None, work: Callable[[Engine], Awaitable[_Answer]], *, notifications: bool = False) -> _Answer:
    """Connect, run the work and disconnect. Works behind a transaction-pooling proxy too."""

    async def asked() -> _Answer:
        from flowfabric.engine import Engine  # noqa: PLC0415 - only commands that connect need it

        async with await Engine.connect(
            dsn, max_size=_CONNECTIONS, notifications=notifications, prepared_statements=False
        ) as engine:
            say.cancel()
            return await work(engine)

    with embedded_running(dsn), waiting_note(dsn) as say:
        return asyncio.run(asked())


@contextlib.contextmanager
def embedded_running(dsn: str | None, data_dir: Path | str | None = None) -> Iterator[None]:
    """Keep the embedded server running for the block, if that is the one to use.

    It is started here and not by the connection, which does it in a thread: Ctrl-C ends the wait for it.
    """
    if dsn or (data_dir is None and not is_embedded(dsn)):
        yield
        return
    server = _started(None if data_dir is None else Path(data_dir))
    try:
        yield
    finally:
        server.release()


def _started(data_dir: Path | None = None) -> Any:
    with waiting_note(None, data_dir):
        return embedded().start(data_dir, patience=_PATIENCE)


@contextlib.contextmanager
def waiting_note(dsn: str | None, data_dir: Path | None = None) -> Iterator[threading.Timer]:
    """Say what the command waits for if the block takes long, unless the timer is cancelled before."""
    if chosen := dsn or (settings.load().dsn if data_dir is None else None):
        from flowfabric._postgres.dsn import check_dsn, describe  # noqa: PLC0415 - loads the driver

        check_dsn(chosen)
        what = f"the database {describe(chosen)}"
    else:
        what = f"the embedded server in {data_dir or settings.load().data_dir}; its log is postgres.log there"
    timer = threading.Timer(_SILENT, note, (f"waiting for {what}",))
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


@contextlib.contextmanager
def address(dsn: str | None) -> Iterator[str]:
    """The DSN given or set in the environment, or that of the embedded server, which runs as long as the block."""
    if chosen := dsn or settings.load().dsn:
        from flowfabric._postgres.dsn import check_dsn  # noqa: PLC0415 - loads the driver

        check_dsn(chosen)
        yield chosen
        return
    server = _started()
    try:
        yield server.dsn
    finally:
        server.release()


@contextlib.contextmanager
def embedded_server(data_dir: Path) -> Iterator[str]:
    """The DSN of the embedded server in a directory, which runs as long as the block."""
    server = _started(data_dir)
    try:
        yield server.dsn
    finally:
        server.release()


def is_embedded(dsn: str | None) -> bool:
    """Whether commands use the embedded server by default."""
    return not (dsn or settings.load().dsn)


def embedded() -> Any:
    """The module of the embedded server; `ConnectionFailed` on platforms without one."""
    try:
        from flowfabric.embedded import server as module  # noqa: PLC0415 - not importable on every platform
    except ImportError as error:
        raise ConnectionFailed(
            "unreachable", f"no embedded server on this platform ({error}); give --dsn or set FLOWFABRIC_DSN"
        ) from error
    return module


def split_password(dsn: str) -> tuple[str, str | None]:
    """A DSN, as `address` returns it, without its secrets, and its password."""
    parts = urlsplit(dsn)
    who, at, where = parts.netloc.rpartition("@")
    user, colon, in_netloc = who.partition(":")
    query = parse_qsl(parts.query, keep_blank_values=True)
    in_query = next((value for name, value in query if name == "password"), None)
    rest = urlencode([pair for pair in query if pair[0].lower() not in _SECRETS], quote_via=quote, safe="/:")
    bare = urlunsplit(parts._replace(netloc=f"{user}{at}{where}", query=rest))
    if not parts.netloc:
        # urlunsplit leaves the empty authority out, which Postgres needs.
        bare = bare.replace(f"{parts.scheme}:/", f"{parts.scheme}:///", 1) if "://" not in bare else bare
    return bare, in_query if in_query is not None else unquote(in_netloc) if colon else None


async def resolve(engine: Engine, text: str, field: str = "ID") -> ExecutionId:
    """The execution that an id names, or a unique end or beginning of one. A whole id is not looked up."""
    return ExecutionId(await _named(engine, text, "execution", field))


async def resolve_flow(engine: Engine, text: str, field: str = "ID") -> FlowId:
    """The flow that an id names, or a unique end or beginning of one. `NotFound` suggests similar ones."""
    return FlowId(await _named(engine, text, "flow", field))


async def resolve_owner(engine: Engine, text: str) -> UUID | None:
    """The execution or flow that an id, or a unique part of one, names; None for a text that names none."""
    try:
        digits = id_digits(text, "ID")
    except InvalidInput:
        return None
    return _only(await engine.find_id(digits, limit=_CANDIDATES + 1), digits, "id", "NAME")


async def missing(engine: Engine, execution_id: ExecutionId) -> NotFound:
    """The error for an unknown id."""
    return await _not_found(engine, str(execution_id), "execution")


async def _named(engine: Engine, text: str, what: What, field: str) -> UUID:
    digits = id_digits(text, field)
    if len(digits) == _WHOLE and what == "execution":
        return UUID(digits)
    found = await engine.find_id(digits, what=what, limit=_CANDIDATES + 1)
    only = _only(found, digits, what, field)
    if only is None:
        raise await _not_found(engine, digits, what)
    return only


def _only(found: Sequence[FoundId], digits: str, what: str, field: str) -> UUID | None:
    """The only one that was found; several are listed and refused."""
    if len(found) > 1:
        for one in found[:_CANDIDATES]:
            note(f"{one.id}  {printable(one.kind)}  {one.state}  {when(one.created_at)}")
        more = "more than " if len(found) > _CANDIDATES else ""
        count = min(len(found), _CANDIDATES)
        raise InvalidInput(f"{more}{count} {what}s end or begin with {digits}", field=field, allowed="more of the id")
    return found[0].id if found else None


async def _not_found(engine: Engine, named: str, what: What) -> NotFound:
    """The error for an id or a part of one that names nothing of this kind."""
    others = await engine.find_id(named, limit=1)
    if not others or others[0].what == what:
        hint = "`flowfabric ls` lists all" if what == "execution" else "`flowfabric flow ls` lists all"
    elif what == "execution":
        hint = f"it is a flow: `flowfabric flow show {others[0].id}`"
    else:
        flow_id = await engine.resolve_execution_flow_id(ExecutionId(others[0].id))
        hint = "it is an execution without a flow" if flow_id is None else f"it is an execution of flow {flow_id}"
    return NotFound(what, UUID(named) if len(named) >= _WHOLE else named, detail=hint)


def near(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?` with the known words most like this one, or an empty text."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"did you mean {printable(' or '.join(found))}?" if found else ""


def no_such(what: str, name: str, known: Sequence[str], *, none: str = "there are none") -> NotFound:
    """The refusal of an unknown name: suggests similar ones, or lists the first that exist."""
    hint = near(name, known) or (f"there are {', '.join(known[:10])}" if known else none)
    return NotFound(what, printable(name), detail=hint)


async def lane_names(engine: Engine) -> list[str]:
    """Every lane, by name."""
    lanes = await everything(lambda after, size: engine.list_lanes(cursor=after, limit=size))
    return [lane.lane_id for lane in lanes]


async def unknown_lane(engine: Engine, lanes: Iterable[str]) -> str:
    """A note about the first lane that does not exist; empty if all exist."""
    known = await lane_names(engine)
    for lane in lanes:
        if lane not in known:
            return f"there is no lane {printable(lane)}; {near(lane, known)}".rstrip("; ")
    return ""
