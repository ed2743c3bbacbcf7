"""Links: a person or a program answers a wait without an API key. The link is the right.

GET shows what is asked, as mail programs open every link; POST decides. Every link that cannot be answered gets one
answer, whatever the reason, so that guessing teaches nothing. Browsers get a page, programs JSON. The link itself is in
no log, no header and no body of ours.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID, uuid4

import msgspec
from msgspec import Struct

from flowfabric.bridges.callbacks import (
    AcceptedSignal,
    TokenMismatch,
    TriggeredResume,
    UnknownWaitpoint,
    verify_and_deliver,
)
from flowfabric.contracts.codecs import Codecs
from flowfabric.contracts.waits import encode_payload
from flowfabric.errors import FlowFabricError, InvalidInput, PayloadRefused
from flowfabric.server import problems
from flowfabric.server.call import Answer, Call
from flowfabric.server.operation import MEDIUM, Operation, Repeats, Within
from flowfabric.server.problems import Problem
from flowfabric.values.callback import Callback, parse_callback
from flowfabric.values.ids import ExecutionId
from flowfabric.values.signal import DuplicateSignal
from flowfabric.values.wait import WaitpointToken

if TYPE_CHECKING:
    from jinja2 import Template

    from flowfabric.values.wait import PendingWaitpoint

_PATH: Final = "/w/{callback}"
_HTML: Final = "text/html; charset=utf-8"
_FORM: Final = "application/x-www-form-urlencoded"
_SOURCE: Final = "link"
_NAMES: Final = ("approved", "rejected")
_BUTTONS: Final = {"approved": "Approve", "rejected": "Reject"}  # names of a task's own are shown as they are
_MOST_NAMES: Final = 20
_GONE: Final = "This link is not valid, has been used, or has expired."
_HEADERS: Final = {
    "Referrer-Policy": "no-referrer",
    "X-Robots-Tag": "noindex",
    "Vary": "Accept",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
}


class AnswerLink(Struct, frozen=True, kw_only=True):
    """`name`: that of the signal. Mail programs add parameters of their own, which are ignored."""

    name: str | None = None


class OpenLink(Struct, frozen=True, kw_only=True):
    """Ignores what mail programs add."""


class AskedByLink(Struct, frozen=True, kw_only=True):
    """The question behind a link. `signal_names` are the names of signals that the task waits for; empty: any."""

    execution_kind: str
    waitpoint_key: str
    signal_names: tuple[str, ...]
    since: datetime
    until: datetime | None


class AnsweredByLink(Struct, frozen=True, kw_only=True):
    """`resumed`: the task continues; `accepted`: it waits for more; `duplicate`: this answer was sent before."""

    status: Literal["resumed", "accepted", "duplicate"]
    signal_id: UUID


async def open_link(call: Call) -> Answer:
    """Show what a link asks for: a page for browsers, JSON for programs. It decides nothing."""
    callback = _parsed(call)
    found = None if callback is None else await _asked(call, callback)
    if found is None:
        raise _gone(call)
    if not _is_browser(call):
        return Answer(body=found, headers=_HEADERS)
    return _page(call, 200, asked=found)


async def answer_link(call: Call) -> Answer:
    """Answer a wait by its link.

    A program sends the payload as the body, in JSON, and the name of the signal as `?name=`; without it the name is
    `callback`. With an `Idempotency-Key` a repeated request is a duplicate. The page sends both as a form. The payload
    must fit what the task waits for (422 otherwise, and the wait stays open).
    """
    callback = _parsed(call)
    if callback is None:
        raise _gone(call)
    is_open = await call.engine.probe_waitpoint(*_where(callback)) == "ok"
    if is_open:
        _check_origin(call)
    try:
        given = _form(call.body) if _is_form(call) else _json(call)
        done = await _deliver(call, callback, given)
    except PayloadRefused as error:
        raise await _misfit(call, callback, given, error) from None
    except (UnknownWaitpoint, TokenMismatch):
        raise _gone(call) from None
    except (FlowFabricError, Problem) as error:
        # Only a sender whose link is open learns what is wrong with the answer.
        if not is_open or error.family == "state" or error.kind == "invalid_token":
            raise _gone(call) from None
        if isinstance(error, InvalidInput) and error.field == "signal_name":
            raise InvalidInput(error.problem, field="name", allowed=error.allowed) from None
        raise
    status = 202 if done.status == "accepted" else 200
    if not _is_browser(call):
        return Answer(body=done, status=status, headers=_HEADERS, target=_target(callback))
    text = f"Your answer “{given.name}” is recorded."
    return replace(_page(call, status, title="Thank you", text=text), target=_target(callback))


class _Given(Struct, frozen=True, kw_only=True):
    """An answer as it was sent."""

    name: str
    payload: Any = None
    text: str = ""  # of the form's field
    once: str | None = None


def _json(call: Call) -> _Given:
    try:
        value = msgspec.json.decode(call.body or b"null")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Problem(400, "invalid_json", "the body is not JSON") from None
    return _Given(name=call.query.name or "callback", payload=value, once=call.idempotency_key)


def _form(body: bytes) -> _Given:
    try:
        fields = dict(parse_qsl(body.decode("ascii"), errors="strict", max_num_fields=10))
    except ValueError:
        raise Problem(400, "bad_request", "the form cannot be read") from None
    text = fields.get("payload", "").strip()
    try:
        value = msgspec.json.decode(text) if text else None
    except (msgspec.DecodeError, RecursionError):
        value = text  # a person who writes a sentence means a text
    return _Given(name=fields.get("name", "callback"), payload=value, text=text, once=fields.get("once") or None)


async def _deliver(call: Call, callback: Callback, given: _Given) -> AnsweredByLink:
    plain, payload, encoding = encode_payload(given.payload, call.service.codecs or Codecs(), callback.execution_id)
    done = await verify_and_deliver(
        call.engine,
        *_where(callback),
        plain,
        signal_name=given.name,
        signal_category="approval" if given.name in _NAMES else "external",
        source_type=_SOURCE,
        payload=payload,
        payload_encoding=encoding,
        idempotency_key=None if given.once is None else f"link:{given.once}",
    )
    match done:
        case TriggeredResume(signal_id):
            return AnsweredByLink(status="resumed", signal_id=signal_id)
        case AcceptedSignal(signal_id):
            return AnsweredByLink(status="accepted", signal_id=signal_id)
        case DuplicateSignal(signal_id):
            return AnsweredByLink(status="duplicate", signal_id=signal_id)


def _where(callback: Callback) -> tuple[ExecutionId, UUID, WaitpointToken]:
    return callback.execution_id, callback.waitpoint_id, callback.token


def _target(callback: Callback) -> str:
    """What the audit log says was answered: never the link."""
    return f"{callback.execution_id}, {callback.waitpoint_id}"


def _is_form(call: Call) -> bool:
    return call.request.headers.get("content-type", "").split(";", 1)[0].strip().lower() == _FORM


def _is_browser(call: Call) -> bool:
    return wants_html(call.request.headers.get("accept", ""))


def _parsed(call: Call) -> Callback | None:
    try:
        return parse_callback(call.path["callback"])
    except InvalidInput:
        return None


async def _asked(call: Call, callback: Callback) -> AskedByLink | None:
    """The question behind a link; None if it cannot be answered now."""
    engine, execution_id = call.engine, callback.execution_id
    if await engine.probe_waitpoint(*_where(callback)) != "ok":
        return None
    kids = await engine.list_waitpoint_hmac_kids()
    if callback.token.kid not in (kids.current_kid, *(one.kid for one in kids.verifying)):
        return None
    info = await engine.read_execution_info(execution_id)
    waitpoint = await _waitpoint(call, callback)
    if info is None or waitpoint is None:
        return None
    until = waitpoint.expires_at
    if waitpoint.state == "active":
        suspension = await engine.read_suspension(execution_id)
        until = None if suspension is None else suspension.timeout_at
    names = tuple(one for one in waitpoint.required_signal_names if not one.startswith("__"))
    return AskedByLink(
        execution_kind=info.execution_kind,
        waitpoint_key=waitpoint.waitpoint_key,
        signal_names=names[:_MOST_NAMES],
        since=waitpoint.created_at,
        until=until,
    )


async def _waitpoint(call: Call, callback: Callback) -> PendingWaitpoint | None:
    before = UUID(int=callback.waitpoint_id.int - 1) if callback.waitpoint_id.int else None
    found = (await call.engine.list_pending_waitpoints(callback.execution_id, after=before, limit=1)).items
    return found[0] if found and found[0].waitpoint_id == callback.waitpoint_id else None


def _check_origin(call: Call) -> None:
    """Refuse a form that another site's page sends: people open the link itself, no other page needs to post to it."""
    if not (_is_form(call) or _is_browser(call)):
        return
    site = call.request.headers.get("sec-fetch-site")
    if site is not None:
        if site in ("same-origin", "none"):
            return
    else:
        # Of a page that sends no referrer, ours for one, the origin is `null`.
        origin = call.request.headers.get("origin")
        if origin in (None, "null") or urlsplit(origin).netloc == call.request.headers.get("host"):
            return
    raise Problem(403, "forbidden", "the page of another site sent this form")


def _gone(call: Call) -> Problem:
    """The one answer for every link that cannot be answered: unknown, forged, used, expired, of an ended execution."""
    problem = Problem(404, "not_found", _GONE, family="not_found")
    if _is_browser(call):
        problem.answer = _page(call, 404, title="Nothing to answer", text=_GONE)
    else:
        problem.answer = _plain(call, problem)
    return problem


async def _misfit(call: Call, callback: Callback, given: _Given, error: PayloadRefused) -> Problem:
    problem = problems.problem_of(error)
    problem.members.pop("execution_id", None)
    # The body of a link is the payload itself.
    problem.errors = tuple(
        msgspec.structs.replace(one, pointer=one.pointer.removeprefix("/payload")) if one.pointer else one
        for one in problem.errors
    )
    asked = await _asked(call, callback) if _is_browser(call) else None
    answer = _plain(call, problem) if asked is None else _page(call, 422, asked=asked, wrong=error, payload=given.text)
    problem.answer = replace(answer, target=_target(callback))
    return problem


def _plain(call: Call, problem: Problem) -> Answer:
    """A refusal for programs, without the id of the request: it is the same for all."""
    document = problem.document("", call.scope.get("root_path", ""))
    return Answer(body=problems.encode(document), media=problems.MEDIA, headers=_HEADERS)


def _page(call: Call, status: int, *, title: str = "Your answer is needed", **values: Any) -> Answer:
    asked: AskedByLink | None = values.get("asked")
    page = template().render(
        title=title,
        buttons=[(name, _BUTTONS.get(name, name)) for name in (asked.signal_names or _NAMES)] if asked else (),
        once=uuid4().hex,
        **{"asked": None, "wrong": None, "payload": "", "text": "", **values},
    )
    return Answer(body=page.encode(), status=status, media=_HTML, headers=_HEADERS)


@cache
def template() -> Template:
    """The page. Every text of users in it is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - only who serves needs it

    place = Path(__file__).parent.parent / "pages"
    pages = Environment(loader=FileSystemLoader(place), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return pages.get_template("link.html")


def wants_html(accept: str) -> bool:
    """Whether a header `Accept` prefers a page. A client that takes anything is a program."""
    best = {"html": 0.0, "json": 0.0}
    for part in accept.lower().split(","):
        media, *parameters = (one.strip() for one in part.split(";"))
        weight = next((one.removeprefix("q=") for one in parameters if one.startswith("q=")), "1")
        try:
            quality = float(weight)
        except ValueError:
            continue
        if media in ("text/html", "application/xhtml+xml"):
            best["html"] = max(best["html"], quality)
        elif media in ("application/json", "application/problem+json", "application/*"):
            best["json"] = max(best["json"], quality)
    return best["html"] > best["json"]


OPERATIONS = (
    Operation(
        method="GET", path=_PATH, handler=open_link, engine=("probe_waitpoint",), scope=None, within=Within.NONE,
        query=OpenLink, also=("text/html",), answers={200: AskedByLink}, no_store=True,
    ),
    Operation(
        method="POST", path=_PATH, handler=answer_link, scope=None, within=Within.NONE, query=AnswerLink, body=bytes,
        also=("text/html",), answers={200: AnsweredByLink, 202: AnsweredByLink}, limit=MEDIUM, repeats=Repeats.OWN,
        no_store=True,
    ),
)  # fmt: skip
