"""Options of a task or of one submission, and the new execution they produce.

Options are checked where they are written: a name that does not exist or a value that cannot be stored is refused when
the task is declared, or before anything is submitted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache, wraps
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from flowfabric.errors import InvalidInput, ValidationFailed
from flowfabric.values.checks import check_key, check_lane, check_tags, check_text, moment, required_capabilities
from flowfabric.values.durations import MAX_DURATION_MS, Duration, duration
from flowfabric.values.execution import NewExecution
from flowfabric.values.policies import FrozenPolicy, RetryPolicy
from flowfabric.values.policy_json import freeze_policy, retry_policy_to_json
from flowfabric.values.spending import NO_LIMITS, Budget, Limits, check_names

F = TypeVar("F", bound=Callable[..., None])
OnDuplicate: TypeAlias = Literal["return", "raise", "replace"]
_ON_DUPLICATE = ("return", "raise", "replace")
# An execution whose handler kills its worker fails after this many workers.
MAX_RECLAIMS = 5
MAX_PRIORITY = 9000
_LONGEST = timedelta(milliseconds=MAX_DURATION_MS)
_AWARE = "a datetime with time zone"


class OptionNames(TypedDict, total=False):
    """The options as keywords, for type checkers. `Options` explains them."""

    lane: str
    priority: int
    retry: RetryPolicy | None
    attempt_timeout: Duration | None
    deadline: Duration | datetime | None
    delay: Duration | None
    at: datetime | None
    capabilities: Collection[str]
    tags: Mapping[str, str] | None
    namespace: str
    idempotency_key: str | None
    dedup_window: Duration | None
    on_duplicate: OnDuplicate
    retention: Duration | None
    max_reclaims: int
    max_replays: int
    on_failure: HookTask | str | None
    on_escalate: HookTask | str | None
    detached: bool
    budgets: Collection[str]
    quotas: Collection[str]
    budget: Budget | None
    inherit_budgets: bool


DEFAULT_LANE = "default"


class HookTask(Protocol):
    """A task, as an option that names one sees it."""

    @property
    def name(self) -> str: ...


class Options(Struct, frozen=True, kw_only=True):
    """Set on a task, overridden per submission; options that are not set keep their value, and tags are added.

    `deadline` is a time, or a duration from submission on. `delay` or `at` is the earliest start. `retention` is how
    long the ended execution is kept. A known `idempotency_key` (known for `dedup_window`, a day unless set) does
    what `on_duplicate` says: return the existing execution (`return`), raise an error (`raise`), or submit a new one
    if the existing one ended without success (`replace`). `max_reclaims` is how many workers may die running it.
    `on_failure` is a task, or its name, that is submitted with an `ff.Failure` when an execution fails for good or
    expires, `on_escalate` with an `ff.Escalation` when a wait with `on_timeout="escalate"` times out.
    `detached`: submitted by a handler it is not its child: it is not cancelled with it, and not kept for it.
    `budgets` and `quotas` are the names of limits that apply to it; `budget` is one of its own, for this execution and
    everything that it submits. Submissions of a handler have the budgets of its execution too, unless it is detached or
    `inherit_budgets` is False.
    """

    lane: str | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    retry: RetryPolicy | UnsetType | None = UNSET
    attempt_timeout: Duration | UnsetType | None = UNSET
    deadline: Duration | datetime | UnsetType | None = UNSET
    delay: Duration | UnsetType | None = UNSET
    at: datetime | UnsetType | None = UNSET
    capabilities: Collection[str] | UnsetType = UNSET
    tags: Mapping[str, str] | None = None
    namespace: str | UnsetType = UNSET
    idempotency_key: str | UnsetType | None = UNSET
    dedup_window: Duration | UnsetType | None = UNSET
    on_duplicate: OnDuplicate | UnsetType = UNSET
    retention: Duration | UnsetType | None = UNSET
    max_reclaims: int | UnsetType = UNSET
    max_replays: int | UnsetType = UNSET
    on_failure: HookTask | str | UnsetType | None = UNSET
    on_escalate: HookTask | str | UnsetType | None = UNSET
    detached: bool | UnsetType = UNSET
    budgets: Collection[str] | UnsetType = UNSET
    quotas: Collection[str] | UnsetType = UNSET
    budget: Budget | UnsetType | None = UNSET
    inherit_budgets: bool | UnsetType = UNSET

    @classmethod
    def of(cls, given: Mapping[str, Any], also: Iterable[str] = ()) -> Options:
        """Check keywords and return them as options. `also` are other valid keywords, for the error message."""
        for name in given:
            if name not in OPTION_NAMES:
                known = sorted({*OPTION_NAMES, *also})
                near = meant(name, known)
                problem = f"there is no option {name!r}" + (f"; {near}" if near else "")
                raise InvalidInput(problem, field="options", allowed=", ".join(known))
        return cls(**given).checked()

    def merged(self, over: Options) -> Options:
        """Return these options with those that `over` sets replaced; tags are added."""
        changes = {
            name: value
            for name in _FIELDS
            if (value := getattr(over, name)) is not UNSET and (value is not None or name != "tags")
        }
        if not changes:
            return self
        if "tags" in changes and self.tags:
            changes["tags"] = {**self.tags, **changes["tags"]}
        # Both say when to start, so setting one unsets the other.
        if changes.get("at") is not None:
            changes.setdefault("delay", UNSET)
        elif changes.get("delay") is not None:
            changes.setdefault("at", UNSET)
        return self.replace(**changes)

    def replace(self, **changes: Any) -> Options:
        """Return a copy with these fields replaced."""
        return msgspec.structs.replace(self, **changes)

    def checked(self) -> Options:
        """Return the same options, or raise `InvalidInput`: a bad option fails where it is written."""
        if self.lane is not UNSET:
            check_lane(self.lane, "lane")
        if self.priority is not UNSET:
            check_priority(self.priority)
        if _given(self.retry) is not None:
            _check_retry(self.retry)
        for field in ("attempt_timeout", "retention", "dedup_window"):
            if (span := _given(getattr(self, field))) is not None:
                _span(span, field)
        if (delay := _given(self.delay)) is not None:
            _span(delay, "delay", least=timedelta(0))
        if (at := _given(self.at)) is not None:
            moment(at, "at", _AWARE)
            if delay is not None:
                raise InvalidInput("both `delay` and `at` are given", field="delay", allowed="one of them")
        if (deadline := _given(self.deadline)) is not None:
            if isinstance(deadline, datetime):
                moment(deadline, "deadline", f"{_AWARE}, or a duration")
            else:
                _span(deadline, "deadline")
        if self.capabilities is not UNSET:
            _check_capabilities(self.capabilities)
        if self.tags is not None:
            check_tags(self.tags)
        if self.namespace is not UNSET:
            check_text(self.namespace, "namespace")
        check_key(_given(self.idempotency_key))
        if self.on_duplicate is not UNSET and self.on_duplicate not in _ON_DUPLICATE:
            raise InvalidInput(f"got {self.on_duplicate!r}", field="on_duplicate", allowed=", ".join(_ON_DUPLICATE))
        for field in ("detached", "inherit_budgets"):
            if (flag := getattr(self, field)) is not UNSET and type(flag) is not bool:
                raise InvalidInput(f"got {flag!r}", field=field, allowed="True or False")
        for field in ("max_reclaims", "max_replays"):
            if (count := getattr(self, field)) is not UNSET:
                _integer(count, field, 0, "an integer from 0")
        for field in ("on_failure", "on_escalate"):
            hook = _given(getattr(self, field))
            if hook is not None and not isinstance(getattr(hook, "name", hook), str):
                raise InvalidInput(f"got {hook!r}", field=field, allowed="a task, its name, or None")
        for field in ("budgets", "quotas"):
            if (names := getattr(self, field)) is not UNSET:
                check_names(names, field)
        if _given(self.budget) is not None and not isinstance(self.budget, Budget):
            raise InvalidInput(f"got {type(self.budget).__name__}", field="budget", allowed="an ff.Budget or None")
        return self

    @property
    def names_limits(self) -> bool:
        """Whether it names budgets or quotas."""
        return self.budgets is not UNSET or self.quotas is not UNSET

    @property
    def policy(self) -> FrozenPolicy:
        """Return the frozen policy for these checked options, without hooks."""
        return self.policy_with(None)

    def policy_with(
        self, hooks: str | None, limits: Limits = NO_LIMITS, flow_budget: Budget | None = None
    ) -> FrozenPolicy:
        """Return the frozen policy for these checked options.

        `hooks` is the JSON of the tasks that they name, `limits` are the budgets and quotas.
        """
        return _policy(
            _given(self.retry),
            _given(self.attempt_timeout),
            None if self.capabilities is UNSET else tuple(self.capabilities),
            _given(self.retention),
            MAX_RECLAIMS if self.max_reclaims is UNSET else self.max_reclaims,
            _given(self.max_replays),
            _given(self.dedup_window),
            hooks,
            limits,
            _given(self.budget),
            self.inherit_budgets is not False,
            flow_budget,
        )

    def item(
        self,
        kind: str,
        payload: bytes,
        encoding: str | None,
        *,
        creator: str = "",
        hooks: str | None = None,
        limits: Limits = NO_LIMITS,
        flow_budget: Budget | None = None,
    ) -> NewExecution:
        """Return the new execution for these options, a task and its arguments.

        `flow_budget` is the budget of the flow whose first node it is.
        """
        delay, deadline = _given(self.delay), _given(self.deadline)
        return NewExecution(
            execution_kind=kind,
            lane_id=DEFAULT_LANE if self.lane is UNSET else self.lane,
            namespace="" if self.namespace is UNSET else self.namespace,
            input_payload=payload,
            payload_encoding=encoding,
            priority=0 if self.priority is UNSET else self.priority,
            creator_identity=creator,
            idempotency_key=_given(self.idempotency_key),
            tags=self.tags,
            policy=self.policy_with(hooks, limits, flow_budget),
            delay_until=_given(self.at) if delay is None else duration(delay, "delay"),
            execution_deadline_at=(
                deadline if deadline is None or isinstance(deadline, datetime) else duration(deadline, "deadline")
            ),
        )


_FIELDS = Options.__struct_fields__
OPTION_NAMES = frozenset(_FIELDS)


def meant(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the closest known name, or an empty string."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def named_arguments(init: F) -> F:
    """Decorate a constructor: an argument that it does not have is `InvalidInput`, with the name that was meant."""
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]

    @wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in known), None)
            problem = str(error)
            if unknown is not None:
                near = meant(unknown, known)
                problem = "is not an argument" + (f"; {near}" if near else "")
            raise InvalidInput(problem, field=unknown or "arguments", allowed=", ".join(known)) from None
        init(*args, **kwargs)

    return cast(F, checked)


def _given(value: Any) -> Any:
    return None if value is UNSET else value


def check_priority(value: object) -> int:
    """Return the priority. The engine clamps it silently, so what it would change is refused where it is written."""
    if type(value) is not int or not 0 <= value <= MAX_PRIORITY:
        raise InvalidInput(f"got {value!r}", field="priority", allowed=f"an integer from 0 to {MAX_PRIORITY}")
    return value


def _integer(value: object, field: str, least: int, allowed: str) -> None:
    if type(value) is not int or not least <= value < 2**31:
        raise InvalidInput(f"got {value!r}", field=field, allowed=allowed)


def _span(value: Duration, field: str, least: timedelta = timedelta(microseconds=1)) -> timedelta:
    span = duration(value, field)
    if not least <= span <= _LONGEST:
        what = "zero" if least == timedelta(0) else "more than zero"
        raise InvalidInput(f"got {value!r}", field=field, allowed=f"from {what} to a century")
    return span


def _ms(value: Duration, field: str) -> int:
    # Round up, so that a span below a millisecond does not become zero.
    return -(-duration(value, field) // timedelta(milliseconds=1))


def _check_retry(value: object) -> None:
    if not isinstance(value, RetryPolicy):
        raise InvalidInput(f"got {type(value).__name__}", field="retry", allowed="a RetryPolicy or None")
    try:
        retry_policy_to_json(value)
    except ValidationFailed as error:
        problem = error.detail.removeprefix("retry_policy.")
        raise InvalidInput(problem, field="retry", allowed="a RetryPolicy or None") from None


def _check_capabilities(value: object) -> None:
    allowed = "a list of words without commas and spaces"
    if isinstance(value, str) or not isinstance(value, Collection):
        raise InvalidInput(f"got {value!r}", field="capabilities", allowed=allowed)
    try:
        required_capabilities(tuple(value))
    except ValidationFailed as error:
        raise InvalidInput(error.detail.partition(":")[2], field="capabilities", allowed=allowed) from None


@lru_cache(maxsize=1024, typed=True)  # True and 1 are equal, and only one of them is an integer
def _policy(
    retry: RetryPolicy | None,
    attempt_timeout: Duration | None,
    capabilities: tuple[str, ...] | None,
    retention: Duration | None,
    max_reclaims: int,
    max_replays: int | None,
    dedup_window: Duration | None,
    hooks: str | None,
    limits: Limits,
    budget: Budget | None,
    inherits: bool,
    flow_budget: Budget | None,
) -> FrozenPolicy:
    """Write only the options that are set; the database has defaults for the rest."""
    policy: dict[str, Any] = {"max_reclaim_count": max_reclaims}
    if retry is not None:
        policy["retry_policy"] = msgspec.json.decode(retry_policy_to_json(retry) or "{}")
    if attempt_timeout is not None:
        policy["timeout_policy"] = {"attempt_timeout_ms": _ms(attempt_timeout, "attempt_timeout")}
    if capabilities:
        policy["routing_requirements"] = {"required_capabilities": list(capabilities)}
    if retention is not None:
        policy["stream_policy"] = {"retention_ttl_ms": _ms(retention, "retention")}
    if max_replays is not None:
        policy["max_replay_count"] = max_replays
    if dedup_window is not None:
        policy["dedup_window_ms"] = _ms(dedup_window, "dedup_window")
    if hooks is not None:
        policy["hooks"] = msgspec.json.decode(hooks)
    if limits.budget_ids:
        policy["budget_ids"] = [str(one) for one in limits.budget_ids]
    if limits.quota_ids:
        policy["quota_policy_ids"] = [str(one) for one in limits.quota_ids]
    for name, own in (("budget", budget), ("flow_budget", flow_budget)):
        if own is not None:
            policy[name] = {"hard": own.hard, "soft": own.soft, "enforcement_mode": own.mode}
    if not inherits:
        policy["inherit_budgets"] = False
    text, derived = freeze_policy(policy)
    return FrozenPolicy(text or "{}", derived)
