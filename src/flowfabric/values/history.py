"""The record of an execution as a file: enough to compare other code with it on another machine."""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec
from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.attempt import Claimed
from flowfabric.values.ids import ExecutionId
from flowfabric.values.step import Step

Fits = Literal["continues", "left", "stops", "fails", "unknown"]


_QUOTED: Final = r"""('[^']*'|"[^"]*")"""
_RENAMED: Final = re.compile(rf"recorded and not asked for: step {_QUOTED}.*; asked for instead: step {_QUOTED}")


class History(Struct, frozen=True, kw_only=True):
    """An unfinished execution as a worker would receive it, with its recorded steps.

    It holds the arguments and results of the execution: keep it where such data may be kept.
    """

    claimed: Claimed
    steps: list[Step]
    version: int | None = None
    flow_partitions: int = 256

    @property
    def execution_id(self) -> ExecutionId:
        return self.claimed.execution_id

    def encode(self) -> bytes:
        """Return the history as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes | str) -> History:
        """Read what `encode` and `flowfabric export` write."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidInput(str(error), field="history", allowed="the output of flowfabric export") from None


class Fit(Struct, frozen=True, kw_only=True):
    """Whether code fits an execution.

    It `continues`, it is `left` to workers of the version in which it began, it `stops` because it was changed, it
    `fails` with an error before it reaches anything new, or that is `unknown`: the handler did not come to a wait in
    time, or reads the database outside a step.
    """

    execution_id: ExecutionId
    kind: str
    verdict: Fits
    why: str | None = None

    @property
    def is_good(self) -> bool:
        return self.verdict in ("continues", "left")


def how_to_fit(*details: str) -> str:
    """Say how code is made to fit executions that were stopped for this reason, or for several."""
    renamed = _RENAMED.match(details[0]) if len(set(details)) == 1 else None
    rest = 'for other changes use ctx.patched, or put the old code back (guide "Change code")'
    if renamed is None or renamed[1] == renamed[2]:
        return f"for a renamed step use was=, {rest}"
    return f"if step {renamed[1]} is now {renamed[2]}, write ctx.step({renamed[2]}, ..., was={renamed[1]}); {rest}"
