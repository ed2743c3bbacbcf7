"""Executions and flows found by a part of an id."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.values.flow import FlowStatus
from flowfabric.values.state import State

What: TypeAlias = Literal["execution", "flow"]


class FoundId(Struct, frozen=True, kw_only=True):
    """An execution or a flow whose id ends or begins with the digits that were looked for."""

    id: UUID
    what: What
    kind: str
    state: State | FlowStatus
    created_at: datetime
