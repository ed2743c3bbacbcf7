"""The create call, rendered once for every driver.

Checks the items, mints missing ids and arranges the items as the arrays of `flowfabric.create_executions`. For an item
that fails its checks the verdict is the error; it is not sent to the database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from flowfabric._postgres.create_columns import BadPolicy, Layout, is_plain, plain_columns
from flowfabric._postgres.rows.verdicts import FOR_ALL
from flowfabric.errors import FlowFabricError, InvalidInput, StateError
from flowfabric.values.checks import MAX_BATCH
from flowfabric.values.execution import Created, Duplicate, NewExecution
from flowfabric.values.ids import PARTITION_VALUES, ExecutionId
from flowfabric.values.state import State


class CreateCall:
    """One call: its columns, `args` for the statement, and the verdicts from its rows.

    Without `partitions` the args hold the last bits of ids, for a statement rendered as `hashed`. `home` is the
    partition for items that may live in any.
    A policy is judged last: an item with a bad one is not sent, but `doubts` are the args of the statement that finds
    out whether it is a duplicate or its lane is closed.
    """

    def __init__(self, items: Sequence[NewExecution], partitions: int | None, home: int | None = None) -> None:
        if len(items) > MAX_BATCH:
            raise InvalidInput(f"{len(items)} items", field="items", allowed=f"at most {MAX_BATCH}")
        self._refused: dict[int, FlowFabricError] = {}
        self._places: list[int] = []  # index in `items` of every item sent
        self._count = len(items)
        self._items = items
        self._given: set[int] = set()
        self._doubtful: list[int] = []
        self.doubts: list[list[Any]] = []
        if all(map(is_plain, items)) and all(item.policy is items[0].policy for item in items):
            self._places = list(range(len(items)))
            self.columns = plain_columns(items, partitions, home)
            return
        lay = Layout(partitions or PARTITION_VALUES, home)
        doubts: list[tuple[Any, ...]] = []
        for place, item in enumerate(items):
            try:
                lay.add(item)
            except BadPolicy as bad:
                self._refused[place] = bad.error
                self._doubtful.append(place)
                doubts.append(bad.identity)
            except FlowFabricError as error:
                self._refused[place] = error
            else:
                self._places.append(place)
        self._places = lay.in_lock_order(self._places)
        self._given = {place for place in self._places if items[place].execution_id is not None}
        self.columns = lay.columns()
        self.doubts = [list(column) for column in zip(*doubts, strict=True)]

    @property
    def args(self) -> list[Any]:
        return self.columns.args

    @property
    def is_empty(self) -> bool:
        return not self._places

    @property
    def refused(self) -> list[FlowFabricError]:
        """The errors of items that were not sent, in their order."""
        return [self._refused[place] for place in sorted(self._refused)]

    def _minted(self, number: int) -> UUID | None:
        """Return the id of a sent item if we minted it: no other call can have used it."""
        return None if self._places[number] in self._given else self.columns.ids[number]

    def verdicts(
        self,
        rows: Sequence[Sequence[Any] | Mapping[str, Any]],
        standing: Sequence[Sequence[Any] | Mapping[str, Any]] = (),
        *,
        repeated: bool = False,
    ) -> list[Created | Duplicate | FlowFabricError]:
        """One verdict per item, in the order of the items. `repeated`: the first try may have been committed."""
        answers: dict[int, Created | Duplicate | FlowFabricError] = dict(self._refused)
        for row in standing:
            ordinal, code, uuid = row.values() if isinstance(row, Mapping) else row
            if code == "duplicate":
                answers[self._doubtful[ordinal - 1]] = Duplicate(ExecutionId(uuid))
            elif code == "lane_closed":
                place = self._doubtful[ordinal - 1]
                answers[place] = self._lane_closed(place, ExecutionId(uuid))
        for row in rows:
            ordinal, code, uuid, state = row.values() if isinstance(row, Mapping) else row
            if ordinal == FOR_ALL:  # created and waiting
                waiting = State(state)
                for place, sent in zip(self._places, self.columns.ids, strict=True):
                    answers[place] = Created(ExecutionId(sent), waiting)
                continue
            place = self._places[ordinal - 1]
            execution_id = ExecutionId(uuid)
            if code == "created" or (repeated and code == "duplicate" and uuid == self._minted(ordinal - 1)):
                answers[place] = Created(execution_id, State(state))
            elif code == "duplicate":
                answers[place] = Duplicate(execution_id)
            else:
                answers[place] = self._lane_closed(place, execution_id)
        return [answers[place] for place in range(self._count)]

    def _lane_closed(self, place: int, execution_id: ExecutionId) -> StateError:
        lane = self._items[place].lane_id
        return StateError("lane_closed", f"the lane {lane} accepts no new executions", execution_id=execution_id)
