"""Bindings: which limits submissions of a scope get."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_lane, check_text

MAX_BINDS: Final = 100
_MAX_TAG: Final = 4096


class Bind(Struct, frozen=True, kw_only=True):
    """The scope of a binding: `ff.Bind(lane="gpu")`, `ff.Bind(kind="chat", tag=("plan", "free"))`.

    Submissions that match all given parts get the limit. `kind` is the name of a task, `flow` the name of a
    flow, for its nodes.
    """

    lane: str | None = None
    kind: str | None = None
    namespace: str | None = None
    tag: tuple[str, str] | None = None
    flow: str | None = None

    def __post_init__(self) -> None:
        if all(part is None for part in (self.lane, self.kind, self.namespace, self.tag, self.flow)):
            raise InvalidInput(
                "nothing is given", field="bind", allowed="a lane, kind, namespace, tag or flow, or several of them"
            )
        if self.lane is not None:
            check_lane(self.lane, "lane")
        for field, value in (("kind", self.kind), ("namespace", self.namespace), ("flow", self.flow)):
            if value is not None and not check_text(value, field):
                raise InvalidInput("empty", field=field, allowed="a non-empty text")
        if self.tag is not None:
            if not isinstance(self.tag, tuple) or len(self.tag) != 2:
                raise InvalidInput(f"got {self.tag!r}", field="tag", allowed="a tuple of a key and its value")
            for part in self.tag:
                check_text(part, "tag", _MAX_TAG)
            if not self.tag[0]:
                raise InvalidInput("the key is empty", field="tag", allowed="a non-empty key")

    def __str__(self) -> str:
        """The scope in words: `lane gpu, tag plan=free`."""
        parts = [
            ("lane", self.lane),
            ("kind", self.kind),
            ("namespace", self.namespace),
            ("tag", None if self.tag is None else "=".join(self.tag)),
            ("flow", self.flow),
        ]
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


def is_bound(
    bind: Bind, *, lane: str, kind: str, namespace: str, tags: Mapping[str, str] | None, flow: str | None
) -> bool:
    """Whether a submission is in the scope of a binding, as the function `bind_items` of the database says."""
    wanted = ((bind.lane, lane), (bind.kind, kind), (bind.namespace, namespace), (bind.flow, flow))
    return all(part is None or part == given for part, given in wanted) and (
        bind.tag is None or (tags or {}).get(bind.tag[0]) == bind.tag[1]
    )


class Binding(Struct, frozen=True, kw_only=True):
    """A budget or quota, and which submissions get it. `is_declared`: by the code of an app."""

    binding_id: UUID
    what: Literal["budget", "quota"]
    limit_id: UUID
    name: str | None
    bind: Bind
    is_declared: bool
    created_at: datetime


def check_binds(given: object) -> tuple[Bind, ...]:
    """Return the scopes of a declaration: one, several, or none."""
    if given is None:
        return ()
    found = (given,) if isinstance(given, Bind) else given
    if not isinstance(found, tuple | list) or not all(isinstance(one, Bind) for one in found):
        raise InvalidInput(f"got {given!r}", field="bind", allowed="an ff.Bind, a list of them, or None")
    if len(found) > MAX_BINDS:
        raise InvalidInput(f"got {len(found)}", field="bind", allowed=f"at most {MAX_BINDS}")
    return tuple(dict.fromkeys(found))
