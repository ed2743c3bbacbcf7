"""How commands reach the database, and how they find the execution or flow that an id names."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit
from uuid import UUID

from flowfabric import settings
from flowfabric.cli._output import printable
from flowfabric.cli._pages import everything
from flowfabric.errors import ConnectionFailed, InvalidInput, NotFound
from flowfabric.values.ids import ExecutionId, FlowId, PartitionKey, parse_uuid, partition_of

if TYPE_CHECKING:
    from flowfabric.engine import Engine

_Answer = TypeVar("_Answer")
_CONNECTIONS = 8
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# With more partitions than this, an id must name its own: they are not all searched.
_MOST_PARTITIONS = 4096
# How many flows are read per partition, to name some of them, if the beginning of an id is ambiguous.
_NAMED = 4
_SECRETS = ("password", "sslpassword")


def ask(dsn: str | None, work: Callable[[Engine], Awaitable[_Answer]], *, notifications: bool = False) -> _Answer:
    """Connect, run the work and disconnect. Works behind a transaction-pooling proxy too."""

    async def asked() -> _Answer:
        from flowfabric.engine import Engine  # noqa: PLC0415 - only commands that connect need it

        async with await Engine.connect(
            dsn, max_size=_CONNECTIONS, notifications=notifications, prepared_statements=False
        ) as engine:
            return await work(engine)

    return asyncio.run(asked())


@contextlib.contextmanager
def address(dsn: str | None) -> Iterator[str]:
    """The DSN given or set in the environment, or that of the embedded server, which runs as long as the block."""
    if chosen := dsn or settings.load().dsn:
        from flowfabric._postgres.dsn import check_dsn  # noqa: PLC0415 - loads the driver

        check_dsn(chosen)
        yield chosen
        return
    server = embedded().start()
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


async def resolve(engine: Engine, text: str) -> ExecutionId:
    """The execution that an id names: the whole id, or its uuid alone. `NotFound` suggests similar ones."""
    given = text.strip()
    if _UUID.fullmatch(given):
        found = await _locate(engine, parse_uuid(given))
        if found is None:
            raise await _not_an_execution(engine, given, parse_uuid(given))
        return found
    if re.fullmatch(r"[0-9a-fA-F]{4,}[0-9a-fA-F-]*", given):
        raise InvalidInput(
            "a part of an id", field="ID", allowed="the whole uuid, or {fp:N}:<uuid> as `flowfabric ls` shows it"
        )
    return ExecutionId.parse(given, "ID")


async def missing(engine: Engine, execution_id: ExecutionId) -> NotFound:
    """The error for an unknown id. It names the execution with the same uuid, if there is one."""
    near = await _locate(engine, execution_id.uuid)
    if near is None:
        return await _not_an_execution(engine, execution_id, execution_id.uuid)
    return NotFound("execution", execution_id, detail=f"did you mean {near}?")


async def _not_an_execution(engine: Engine, named: str, uuid: UUID) -> NotFound:
    hint = "`flowfabric ls` lists all"
    if await _flows_from(engine, uuid.hex):
        hint = f"it is a flow: `flowfabric flow show {uuid}`"
    return NotFound("execution", named, detail=hint)


async def _locate(engine: Engine, uuid: UUID) -> ExecutionId | None:
    """The execution with this uuid: tried first in the partition of an execution without a flow, then in all."""
    count = engine.flow_partitions
    likely = ExecutionId.of(partition_of(uuid.bytes, count), uuid)
    if await engine.read_execution_state(likely) is not None:
        return likely
    if count > _MOST_PARTITIONS:
        raise InvalidInput("the uuid alone does not name a partition", field="ID", allowed="{fp:N}:<uuid>")
    others = [ExecutionId.of(partition, uuid) for partition in range(count)]
    states = await asyncio.gather(*(engine.read_execution_state(other) for other in others))
    return next((other for other, state in zip(others, states, strict=True) if state is not None), None)


async def resolve_flow(engine: Engine, text: str) -> FlowId:
    """The flow that an id names: the whole id, or a unique beginning. `NotFound` suggests similar ones."""
    given = text.strip().lower()
    if given.startswith("{"):
        raise await _not_a_flow(engine, given, ExecutionId.parse(given, "ID").uuid)
    digits = given.replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{4,32}", digits):
        raise InvalidInput(
            f"got {text!r}", field="ID", allowed="the id of a flow as `flowfabric flow ls` shows it, or its beginning"
        )
    found = await _flows_from(engine, digits)
    if not found:
        raise await _not_a_flow(engine, given, UUID(digits) if len(digits) == 32 else None)
    if len(found) > 1:
        some = ", ".join(map(str, found[:3])) + (", ..." if len(found) > 3 else "")
        raise InvalidInput(f"more than one flow begins with {given}: {some}", field="ID", allowed="more of the id")
    return found[0]


async def _flows_from(engine: Engine, digits: str) -> list[FlowId]:
    """Flows whose ids begin with these digits, at most a few of each partition."""
    least, count = UUID(digits.ljust(32, "0")), engine.flow_partitions
    if len(digits) == 32:
        places: Iterable[int] = [partition_of(least.bytes, count)]
    elif count > _MOST_PARTITIONS:
        raise InvalidInput("a part of the id does not name a partition", field="ID", allowed="the whole id")
    else:
        places = range(count)
    after = FlowId(UUID(int=least.int - 1)) if least.int else None
    pages = await asyncio.gather(
        *(engine.list_flows(PartitionKey("fp", place), cursor=after, limit=_NAMED) for place in places)
    )
    return sorted(one.flow_id for page in pages for one in page.items if one.flow_id.hex.startswith(digits))


async def _not_a_flow(engine: Engine, given: str, uuid: UUID | None) -> NotFound:
    hint = "`flowfabric flow ls` lists all"
    member = None if uuid is None else await _locate(engine, uuid)
    if member is not None:
        flow_id = await engine.resolve_execution_flow_id(member)
        hint = "it is an execution without a flow" if flow_id is None else f"it is an execution of flow {flow_id}"
    return NotFound("flow", given, detail=hint)


def near(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?` with the known words most like this one, or an empty text."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"did you mean {printable(' or '.join(found))}?" if found else ""


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
