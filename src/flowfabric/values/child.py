"""Tasks and flows that a handler submitted, as lists and trees show them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from flowfabric.values.ids import ExecutionId, FlowId

ChildKind: TypeAlias = Literal["execution", "flow"]


class Child(Struct, frozen=True, kw_only=True):
    """A task or a flow that the handler of an execution submitted.

    In a tree also what follows below it: the members of a flow, whose parent is the flow, and their children. `name` is
    that of the task or flow, `node` that of a member in its flow. The state of a flow is that of its members
    now, and it ended with the last of them; a flow with more than 1,000 members has the state of its last count.
    """

    kind: ChildKind
    id: UUID
    parent_id: ExecutionId | FlowId
    name: str
    node: str | None
    state: str
    created_at: datetime
    completed_at: datetime | None
    depth: int
    arguments: str = ""  # their beginning, as in lists
