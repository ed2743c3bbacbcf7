"""One submission: a task, its arguments and its options, until it is a new execution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from flowfabric.contracts.codecs import Codecs
from flowfabric.contracts.signature import Signature
from flowfabric.errors import InvalidInput
from flowfabric.values.execution import NewExecution
from flowfabric.values.options import Options

if TYPE_CHECKING:
    from flowfabric.client.run import Run

R_co = TypeVar("R_co", covariant=True)


class Submittable(Protocol[R_co]):
    """What a submission needs to know of a task."""

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> Signature: ...

    @property
    def parameter_names(self) -> frozenset[str]: ...

    @property
    def defaults(self) -> Options: ...

    @property
    def codecs(self) -> Codecs: ...

    def run(self, execution_id: str) -> Run[R_co]: ...


def check_task(value: Any) -> Submittable[Any]:
    """The task that was given, which must be one."""
    if not isinstance(getattr(value, "signature", None), Signature):
        raise InvalidInput(f"got {type(value).__name__}", field="task", allowed="a task: what @app.task gave")
    return value  # type: ignore[no-any-return]  # nothing else has a signature of ours


class Submission(Struct, frozen=True, kw_only=True):
    """What middleware sees and may replace on the way: which task, with which arguments and options."""

    task: Submittable[Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    options: Options = Options()

    @property
    def kind(self) -> str:
        """The task's name."""
        return self.task.name

    def replace(self, **changes: Any) -> Submission:
        """The same with other parts."""
        return msgspec.structs.replace(self, **changes)

    def item(self, creator: str = "") -> NewExecution:
        """The new execution; `InvalidInput` names the argument or the option that is wrong."""
        task = self.task
        payload, encoding = task.codecs.seal(task.signature.encode(self.args, self.kwargs))
        return self.options.item(task.name, payload, encoding, creator=creator)
