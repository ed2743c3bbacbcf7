"""The exception for a refusal of the database."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from flowfabric._taxonomy import LEASE_LOST_KINDS, TAXONOMY
from flowfabric.errors import (
    Conflict,
    Contention,
    Corruption,
    ExecutionNotActive,
    FlowFabricError,
    InvalidInput,
    LeaseLost,
    NotFound,
    PayloadRefused,
    RetriesExhausted,
    StateError,
    ValidationFailed,
)

_REFUSALS: Final[Mapping[str, type[FlowFabricError]]] = MappingProxyType(
    {cls.family: cls for cls in (NotFound, ValidationFailed, Contention, Conflict, StateError)}
)
_REFUSAL_FAMILY: Final[Mapping[str, str]] = MappingProxyType(
    {row.kind: row.family for row in TAXONOMY if row.family in _REFUSALS}
)


def refusal(kind: str, detail: str = "", *, execution_id: UUID | None = None, **facts: Any) -> FlowFabricError:
    """The exception for a refusal that arrived as a kind, in its most specific class.

    Kinds are unique among the families a refusal can belong to, so the kind alone decides. `facts` are the
    extra attributes of that class (`entity` and `id` of not_found, `field` of invalid_input, the four texts
    of execution_not_active). Raises ValueError for an unknown kind.
    """
    family = _REFUSAL_FAMILY.get(kind)
    if family is None:
        raise ValueError(f"there is no refusal {kind!r}")
    match kind:
        case "not_found":
            return NotFound(facts.pop("entity", "execution"), facts.pop("id", execution_id), detail=detail)
        case "invalid_input":
            return InvalidInput(detail, execution_id=execution_id, **facts)
        case "payload_refused":
            return PayloadRefused(
                facts.pop("field", "payload"), detail, facts.pop("allowed", ""), execution_id=execution_id
            )
        case "corruption":
            return Corruption(detail, execution_id=execution_id)
        case "execution_not_active":
            return ExecutionNotActive(detail, execution_id=execution_id, **facts)
        case "retry_exhausted":
            return RetriesExhausted(detail, execution_id=execution_id)
        case _ if kind in LEASE_LOST_KINDS:
            return LeaseLost(kind, detail, execution_id=execution_id)
        case _ if family == "conflict":
            return Conflict(kind, detail, execution_id=execution_id, **facts)
        case _:
            return _REFUSALS[family](kind, detail, execution_id=execution_id)
