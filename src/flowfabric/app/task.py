"""Tasks: functions that can be submitted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, Unpack, overload

from msgspec import UNSET

from flowfabric.app.code import code_digest
from flowfabric.app.context import Context
from flowfabric.app.sync_context import SyncContext
from flowfabric.bridges._submission import AsyncConnection, SyncConnection
from flowfabric.client.hooks import HOOKS, hook_spec
from flowfabric.client.in_transaction import submit_in
from flowfabric.client.limits import LimitNames
from flowfabric.client.run import Run
from flowfabric.client.submission import Submission, new_submission
from flowfabric.contracts.codecs import Codecs
from flowfabric.contracts.json_types import ENCODER
from flowfabric.contracts.signature import Signature
from flowfabric.errors import InvalidInput
from flowfabric.values.checks import check_text
from flowfabric.values.ids import parse_execution_id
from flowfabric.values.options import OptionNames, Options
from flowfabric.values.spending import ON_BUDGET, OnBudget

if TYPE_CHECKING:
    from flowfabric.app.app import App

P = ParamSpec("P")
R = TypeVar("R")
Pool = Literal["thread", "process"]
StepsRule = Literal["strict", "lenient"]


class Task(Generic[P, R]):
    """A function that can be submitted. Calling it runs the function directly."""

    def __init__(
        self,
        app: App,
        function: Callable[..., Any],
        *,
        name: str,
        options: Options,
        pool: Pool,
        permanent: tuple[type[Exception], ...],
        steps: StepsRule,
        versions: tuple[int, ...] = (),
        on_budget: OnBudget = "pause",
    ) -> None:
        self.app = app
        self.function = function
        self.name = name
        self.defaults = options
        self.pool: Pool = pool
        self.permanent = permanent
        self.steps: StepsRule = steps
        self.versions = versions  # that it serves, first its own; none: the task has no version
        self.signature = _signature(function)
        self.parameter_names = frozenset(each.name for each in self.signature.parameters)
        if pool not in ("thread", "process"):
            raise InvalidInput(f"got {pool!r}", field="pool", allowed="thread, process")
        if pool == "process":
            self._check_process()
        self.on_budget: OnBudget = on_budget
        if on_budget not in ON_BUDGET:
            raise InvalidInput(f"got {on_budget!r}", field="on_budget", allowed=", ".join(ON_BUDGET))
        if steps not in ("strict", "lenient"):
            raise InvalidInput(f"got {steps!r}", field="steps", allowed="strict, lenient")
        for attribute in ("__module__", "__qualname__", "__doc__", "__name__"):
            if hasattr(function, attribute):
                setattr(self, attribute, getattr(function, attribute))
        self.__wrapped__ = function

    def _check_process(self) -> None:
        if self.signature.is_async:
            problem = "is async"
        elif self.signature.context_param is not None or self.signature.data:
            problem = "takes a context or shared data"
        elif "<" in getattr(self.function, "__qualname__", "<"):
            problem = "cannot be found by its name in another process"
        else:
            return
        raise InvalidInput(
            f"{self.name} {problem}",
            field="pool",
            allowed="a synchronous module function with arguments only",
        )

    @functools.cached_property
    def code_digest(self) -> str:
        """A digest of the function's code: the same in every process that has the same code."""
        return code_digest(self.function)

    @property
    def codecs(self) -> Codecs:
        """The codecs of the app."""
        return self.app.codecs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function directly."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def options(self, **options: Unpack[OptionNames]) -> Task[P, R]:
        """Return the same task with other options: `publish.options(priority=5).submit(42)`."""
        changed: Task[P, R] = object.__new__(Task)
        changed.__dict__.update(self.__dict__)
        changed.defaults = self.defaults.merged(Options.of(options))
        return changed

    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Submit the task with these arguments. Inside a task it is submitted only once, even if the handler is re-run.

        Options of this submission: `publish.options(idempotency_key="draft-42").submit(42)`. Where no type checker is
        used, keywords of `submit` that are no parameters of the task are options too.
        """
        client = await self.app.client()
        return await client.send(new_submission(self, args, kwargs))

    @overload
    def submit_in(
        self, connection: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, Run[R]]: ...
    @overload
    def submit_in(self, connection: SyncConnection | str, /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    def submit_in(self, connection: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit the task as part of the transaction of your connection; await it if the connection is async.

        The connection is one of asyncpg, a connection or cursor of psycopg, a connection or session of SQLAlchemy, or
        an alias of Django's `DATABASES`. When you commit, the execution exists and workers are woken; after a rollback
        it never existed. Inside a task it is not remembered: a handler that is run again submits again, unless the
        call is in a step or has an idempotency key.
        """
        return submit_in(self.app, connection, new_submission(self, args, kwargs))

    def submission(self, *args: P.args, **kwargs: P.kwargs) -> Submission:
        """Return the item that `submit` would submit, for `submit_many`: each item can have its own options."""
        return new_submission(self, args, kwargs)

    async def submit_many(self, arguments: Iterable[Any], **options: Unpack[OptionNames]) -> list[Run[R]]:
        """Submit once per item, in few calls: a tuple holds the arguments, anything else is the one argument.

        Items made with `submission()` are used unchanged. A wrong argument in any item fails before anything is stored.
        """
        client = await self.app.client()
        return await client.submit_many(self, arguments, **options)

    def hooks(self, options: Options, *, nested: bool) -> str | None:
        """Return the tasks to submit when an execution with these options fails or is escalated, as JSON.

        `nested`: it is a member of a flow, or a handler submits it.
        """
        found = {HOOKS[field]: hook_spec(task) for field, task in self.hook_tasks(options, nested=nested).items()}
        return ENCODER.encode(found).decode() if found else None

    def hook_tasks(self, options: Options, *, nested: bool) -> dict[str, Task[Any, Any]]:
        """Return the tasks that `hooks` writes, by option: `on_failure`, `on_escalate`."""
        app = self.app
        if options.on_failure is options.on_escalate is UNSET is app.on_failure is app.on_escalate:
            return {}
        found: dict[str, Task[Any, Any]] = {}
        for field in HOOKS:
            chosen = getattr(options, field)
            if chosen is UNSET:
                chosen = UNSET if nested and not app.everywhere else getattr(app, field)
            task = None if chosen is UNSET or chosen is None else app.hook(chosen, field)
            if task is not None and task.name != self.name:  # never for hooks themselves
                found[field] = task
        return found

    @property
    def limit_names(self) -> LimitNames:
        """The budgets and quotas that the app knows by name."""
        return self.app.limit_names

    def run(self, execution_id: str) -> Run[R]:
        """A handle on an execution of this task, from its id."""
        return Run(parse_execution_id(execution_id), kind=self.name, connector=self.app)


def checked_function(given: Any) -> Callable[..., Any]:
    """Return the decorated function, if a task can be made of it."""
    if isinstance(given, staticmethod):
        given = given.__func__
    if isinstance(given, Task):
        raise InvalidInput(f"is already the task {given.name}", field="fn", allowed="its function: `task.function`")
    if isinstance(given, classmethod) or _is_method(given):
        raise InvalidInput(
            f"{getattr(given, '__qualname__', 'it')} is a method, and a worker has no object for it",
            field="fn",
            allowed="a function, or a static method",
        )
    if not callable(given):
        raise InvalidInput(f"got {type(given).__name__}", field="fn", allowed="a function, sync or async")
    return given  # type: ignore[no-any-return]  # any callable


def _is_method(given: object) -> bool:
    """Whether this is a function in the body of a class that expects the object."""
    around = getattr(given, "__qualname__", "").rpartition(".")[0]
    if not inspect.isfunction(given) or not around or around.endswith("<locals>"):
        return False
    first = next(iter(inspect.signature(given).parameters.values()), None)
    return first is not None and first.name in ("self", "cls") and first.annotation is first.empty


def task_name(fn: Callable[..., Any], given: str | None) -> str:
    if given is not None:
        return checked_name(given)
    own = getattr(fn, "__name__", "")
    if not own or own == "<lambda>":
        what = "a lambda" if own else f"a {type(fn).__name__}"
        raise InvalidInput(f"{what} has no name", field="name", allowed="name=... in the decorator")
    return checked_name(own)


def checked_name(text: str) -> str:
    if not check_text(text, "name"):
        raise InvalidInput("empty", field="name", allowed="a non-empty text")
    return text


def origin_of(fn: Callable[..., Any]) -> tuple[str, str]:
    """Return where a function is defined: module and qualified name."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    return str(named.__module__), str(named.__qualname__)


def checked_exceptions(given: Sequence[type[Exception]]) -> tuple[type[Exception], ...]:
    allowed = "a list of exception classes"
    if isinstance(given, type) or not isinstance(given, Iterable):
        raise InvalidInput(f"got {given!r}", field="permanent", allowed=allowed)
    found = tuple(given)
    for one in found:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise InvalidInput(f"got {one!r}", field="permanent", allowed=allowed)
    return found


def _signature(fn: Callable[..., Any]) -> Signature:
    found = Signature.of(fn, context_types=(Context, SyncContext))
    if found.context_param is None:
        return found
    right, what = (Context, "async") if found.is_async else (SyncContext, "synchronous")
    try:
        return Signature.of(fn, context_types=(right,))
    except InvalidInput as error:
        if error.field != found.context_param:
            raise
    raise InvalidInput(
        f"is the wrong context: {found.name} is {what}", field=found.context_param, allowed=right.__name__
    )
