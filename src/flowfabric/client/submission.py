"""One submission: a task with its arguments and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import msgspec
from msgspec import Struct

from flowfabric.client.limits import LimitNames
from flowfabric.contracts.codecs import Codecs
from flowfabric.contracts.signature import Signature
from flowfabric.errors import InvalidInput
from flowfabric.values.execution import NewExecution
from flowfabric.values.ids import PARTITION_VALUES, ExecutionId, mint_execution_id
from flowfabric.values.options import OPTION_NAMES, Options, meant

if TYPE_CHECKING:
    from flowfabric.client.run import Run

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Submittable(Protocol[R_co]):
    """A task, as a submission sees it."""

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

    def hooks(self, options: Options, *, nested: bool) -> str | None:
        """The JSON of the tasks to submit when an execution with these options fails or is escalated."""

    def hook_tasks(self, options: Options, *, nested: bool) -> Mapping[str, Submittable[Any]]:
        """The tasks that `hooks` writes, by option."""

    @property
    def limit_names(self) -> LimitNames:
        """The budgets and quotas that the app knows by name."""


class TypedTask(Submittable[R_co], Protocol[P, R_co]):
    """A task whose arguments a type checker checks."""

    def submission(self, *args: P.args, **kwargs: P.kwargs) -> Submission: ...


def check_task(value: Any) -> Submittable[Any]:
    """Refuse anything that is not a task."""
    if not isinstance(getattr(value, "signature", None), Signature):
        raise InvalidInput(f"got {type(value).__name__}", field="task", allowed="a task, as @app.task returns it")
    return value  # type: ignore[no-any-return]  # only tasks have a Signature


class Submission(Struct, frozen=True, kw_only=True):
    """A task with its arguments and options, as middleware sees it and may replace it."""

    task: Submittable[Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    options: Options = Options()

    @property
    def kind(self) -> str:
        """The task's name."""
        return self.task.name

    def replace(self, **changes: Any) -> Submission:
        """A copy with some parts changed."""
        return msgspec.structs.replace(self, **changes)

    def item(
        self, *, bound: bool = True, creator: str = "", nested: bool = False, parent_id: ExecutionId | None = None
    ) -> NewExecution:
        """The new execution to create; `InvalidInput` names a wrong argument or option.

        If codecs bind arguments to their execution, it has an id. `bound=False` makes an item for executions to come.
        `nested`: a handler submits it, so that hooks of the app do not apply; `parent_id`: as its child.
        """
        task = self.task
        hooks = task.hooks(self.options, nested=nested)
        limits = task.limit_names.limits(self.options, task.name if bound else None)
        plain = task.signature.encode(self.args, self.kwargs)
        if not bound or not task.codecs.binds:
            payload, encoding = task.codecs.seal(plain, None)
            return self.options.item(task.name, payload, encoding, creator=creator, hooks=hooks, limits=limits)
        item = self.options.item(task.name, b"", None, creator=creator, hooks=hooks, limits=limits)
        execution_id = mint_execution_id(
            namespace=item.namespace,
            idempotency_key=item.idempotency_key,
            parent_id=parent_id,
            count=PARTITION_VALUES,
        )
        payload, encoding = task.codecs.seal(plain, execution_id)
        return msgspec.structs.replace(
            item, execution_id=execution_id, input_payload=payload, payload_encoding=encoding
        )


def new_submission(task: Submittable[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Submission:
    """A submission of a task. Keywords that are not parameters of the task are options."""
    check_task(task)
    if not kwargs:
        return Submission(task=task, args=args, options=task.defaults)
    arguments = {name: value for name, value in kwargs.items() if name in task.parameter_names}
    given = {name: value for name, value in kwargs.items() if name not in arguments}
    for name in given:
        if name not in OPTION_NAMES:
            raise _no_keyword(task, name)
    options = task.defaults.merged(Options.of(given)) if given else task.defaults
    return Submission(task=task, args=args, kwargs=arguments, options=options)


def _no_keyword(task: Submittable[Any], name: str) -> InvalidInput:
    signature = task.signature
    if name == signature.context_param or name in signature.data:
        problem = f"is not an argument of {task.name}: the worker provides it"
    else:
        near = meant(name, task.parameter_names | OPTION_NAMES)
        problem = f"is neither an argument of {task.name} nor an option" + (f"; {near}" if near else "")
    names = ", ".join(parameter.name for parameter in signature.parameters)
    return InvalidInput(problem, field=name, allowed=names or "no arguments")
