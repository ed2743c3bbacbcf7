"""Quotas: rates and caps that executions wait for, and admission for callers that do not claim."""

from __future__ import annotations

from datetime import datetime, timedelta
from unicodedata import category
from uuid import UUID

from flowfabric._postgres import rows, statements
from flowfabric.engine.base import Operations, first_page
from flowfabric.engine.checks import check_duration, check_filled, check_filter, check_int, check_limit, check_low_water
from flowfabric.errors import Contention, Corruption, InvalidInput, NotFound
from flowfabric.values.checks import check_text, moment, quoted
from flowfabric.values.ids import ExecutionId, QuotaPolicyId, parse_execution_id, parse_uuid
from flowfabric.values.page import Page, ScannerFilter
from flowfabric.values.quota import (
    DEFAULT_KEY,
    DEFAULT_WINDOW,
    MAX_JITTER,
    MAX_QUOTA,
    MAX_WINDOW,
    AdmissionAnswer,
    Admitted,
    AlreadyAdmitted,
    ConcurrencyExceeded,
    QuotaKey,
    QuotaLimits,
    QuotaPlace,
    QuotaPolicy,
    QuotaPolicyCreated,
    QuotaPolicyExists,
    QuotaRound,
    RateExceeded,
    Released,
    UnblockRound,
    quota_policy_id_of,
)


class Quotas(Operations):
    """create_quota_policy, update_quota_policy, list_quota_policies, check_admission, release_admission, ..."""

    async def create_quota_policy(
        self,
        quota_policy_id: QuotaPolicyId | None = None,
        *,
        name: str | None = None,
        key: str | None = None,
        window: timedelta = DEFAULT_WINDOW,
        max_requests_per_window: int = 0,
        max_concurrent: int = 0,
        jitter: timedelta = timedelta(0),
    ) -> QuotaPolicyCreated | QuotaPolicyExists:
        """Create a policy: a rate, a cap, or both; 0 is no limit. One that exists is left as it is.

        Without an id the name decides it. With a `key`, the name of a tag, the numbers hold for each value of the tag.
        """
        if quota_policy_id is None and name is None:
            raise InvalidInput("neither an id nor a name", field="name", allowed="a name, or a quota_policy_id")
        known_as = None if name is None else _name(name)
        chosen = _policy_id(quota_policy_id) if quota_policy_id is not None else quota_policy_id_of(str(known_as))
        row = await self._row(
            statements.CREATE_QUOTA_POLICY,
            chosen,
            known_as,
            None if key is None else check_filled(key, "key"),
            _window(window),
            check_int(max_requests_per_window, "max_requests_per_window", 0, MAX_QUOTA),
            check_int(max_concurrent, "max_concurrent", 0, MAX_QUOTA),
            check_duration(jitter, "jitter", least_ms=0, most=MAX_JITTER),
        )
        match row["code"]:
            case "created":
                return QuotaPolicyCreated(chosen)
            case "exists":
                return QuotaPolicyExists(chosen)
            case _:
                raise InvalidInput(
                    f"{known_as!r} is the name of another policy", field="name", allowed="a name that no policy has"
                )

    async def update_quota_policy(
        self,
        quota_policy_id: QuotaPolicyId,
        *,
        window: timedelta | None = None,
        max_requests_per_window: int | None = None,
        max_concurrent: int | None = None,
        jitter: timedelta | None = None,
        updated_at: datetime | None = None,
    ) -> None:
        """Change the numbers of a policy. Executions that fit now become claimable; running ones stay.

        With `updated_at`, that of the policy as it was read, nothing changes if it was changed since: `Contention`
        (`stale_definition`).
        """
        target = _policy_id(quota_policy_id)
        row = await self._row(
            statements.UPDATE_QUOTA_POLICY,
            target,
            None if window is None else _window(window),
            None
            if max_requests_per_window is None
            else check_int(max_requests_per_window, "max_requests_per_window", 0, MAX_QUOTA),
            None if max_concurrent is None else check_int(max_concurrent, "max_concurrent", 0, MAX_QUOTA),
            None if jitter is None else check_duration(jitter, "jitter", least_ms=0, most=MAX_JITTER),
            None if updated_at is None else moment(updated_at, "updated_at"),
        )
        if row["code"] == "not_found":
            raise NotFound("quota_policy", str(target))
        if row["code"] == "stale":
            raise Contention("stale_definition", f"quota policy {target} was changed after {updated_at}")

    async def read_quota_policy_limits(self, quota_policy_id: QuotaPolicyId) -> QuotaLimits | None:
        """Return the numbers of a policy; None if it does not exist."""
        found = await self.get_quota_policy(quota_policy_id)
        if found is None:
            return None
        limits = found.limits
        if min(limits.max_requests_per_window, limits.requests_per_window_seconds) < 0 or (
            min(limits.active_concurrency_cap, limits.jitter_ms) < 0
        ):
            raise Corruption(f"quota policy {found.quota_policy_id} has a negative number")
        return limits

    async def get_quota_policy(
        self, quota_policy_id: QuotaPolicyId | None = None, *, name: str | None = None
    ) -> QuotaPolicy | None:
        """Return a policy by its id or its name, and how full it is; None if it does not exist."""
        if (quota_policy_id is None) == (name is None):
            raise InvalidInput("not exactly one is given", field="name", allowed="a name, or a quota_policy_id")
        found = await self._fetch(
            statements.LIST_QUOTA_POLICIES,
            None if quota_policy_id is None else _policy_id(quota_policy_id),
            None if name is None else _name(name),
            None,
            None,
            1,
            repeatable=True,
        )
        return rows.quota_policy(found[0]) if found else None

    async def list_quota_policies(
        self, *, name_prefix: str | None = None, cursor: QuotaPolicyId | None = None, limit: int = 100
    ) -> Page[QuotaPolicy, QuotaPolicyId]:
        """Return the policies by id, with how full they are and how many executions wait for each."""
        size = check_limit(limit, 1000)
        prefix = None if name_prefix is None else check_text(name_prefix, "name_prefix")
        after = None if cursor is None else _policy_id(cursor, "cursor")
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_QUOTA_POLICIES, None, None, prefix, after, size + 1, repeatable=True)
        return first_page([rows.quota_policy(row) for row in found], size, lambda last: last.quota_policy_id)

    async def list_quota_keys(
        self, quota_policy_id: QuotaPolicyId, *, cursor: str | None = None, limit: int = 100
    ) -> Page[QuotaKey, str]:
        """Return the values of a policy's key that are in use, in order, with how full each is."""
        size = check_limit(limit, 1000)
        target = _policy_id(quota_policy_id)
        after = None if cursor is None else check_text(cursor, "cursor", None)
        if size == 0:
            return Page(())
        found = await self._fetch(statements.LIST_QUOTA_KEYS, target, after, size + 1, repeatable=True)
        return first_page([rows.quota_key(row) for row in found], size, lambda last: last.key)

    async def check_admission(
        self,
        quota_policy_id: QuotaPolicyId,
        execution_id: ExecutionId,
        *,
        dimension: str = DEFAULT_KEY,
        window: timedelta = DEFAULT_WINDOW,
        rate_limit: int = 0,
        concurrency_cap: int = 0,
        jitter: timedelta = timedelta(0),
    ) -> AdmissionAnswer:
        """Take a slot for an execution, under limits that the caller gives; the policy need not exist.

        The slot ends with the window, or by `release_admission`; while the execution is active it stays. Claims take
        slots by themselves.
        """
        target = parse_execution_id(execution_id)
        row = await self._row(
            statements.CHECK_ADMISSION,
            _policy_id(quota_policy_id),
            check_text(dimension, "dimension"),
            *self._at(target),
            _window(window),
            check_int(rate_limit, "rate_limit", 0, MAX_QUOTA),
            check_int(concurrency_cap, "concurrency_cap", 0, MAX_QUOTA),
            check_duration(jitter, "jitter", least_ms=0, most=MAX_JITTER),
        )
        match row["code"]:
            case "admitted":
                return Admitted()
            case "already_admitted":
                return AlreadyAdmitted()
            case "rate_exceeded":
                return RateExceeded(timedelta(milliseconds=row["retry_after_ms"]))
            case _:
                return ConcurrencyExceeded()

    async def release_admission(self, quota_policy_id: QuotaPolicyId, execution_id: ExecutionId) -> Released:
        """Give the slot of an execution back, if it has one. Its admission stays in the window."""
        target = parse_execution_id(execution_id)
        await self._row(statements.RELEASE_ADMISSION, _policy_id(quota_policy_id), *self._at(target))
        return Released()

    async def unblock_limited(
        self,
        *,
        limit: int = 100,
        after: tuple[UUID, str] | None = None,
        low_water: datetime | None = None,
        filter: ScannerFilter | None = None,  # noqa: A002 - the contract's word
    ) -> UnblockRound:
        """Make claimable what limits have room for: one page of the limits that are due, or of all after `after`.

        A pass over all begins after `(UUID(int=0), "")`. With a `filter`, only matching executions; it needs `after`,
        because a limit that is due is due for all tenants. `low_water`: from `look_for_due`; limits that were due
        before it are passed over.
        """
        chosen = check_filter(filter)
        if after is None and any(chosen):
            raise InvalidInput("a filter without `after`", field="filter", allowed="a filter in a pass over all limits")
        size = check_int(limit, "limit", 1, 1000)
        row = await self._row(statements.UNBLOCK_LIMITED, size, *_place(after), *chosen, check_low_water(low_water))
        last = None if row["last_limit"] is None else (row["last_limit"], row["last_key"])
        return UnblockRound(
            promoted=row["promoted"], looked=row["looked"], failed=row["failed"], message=row["message"], last=last
        )

    async def reconcile_quotas(self, *, after: QuotaPlace | None = None, limit: int = 100) -> QuotaRound:
        """Remove aged entries of windows and dead slots of one page of the keys of policies. For the duty."""
        row = await self._row(
            statements.RECONCILE_QUOTAS,
            *((None, None, None) if after is None else _quota_place(after)),
            check_int(limit, "limit", 1, 1000),
        )
        last = None
        if row["last_policy"] is not None:
            last = QuotaPlace(row["last_policy"], row["last_key"], row["last_number"])
        return QuotaRound(entries=row["entries"], slots=row["slots"], heads=row["heads"], last=last)


def _place(after: object) -> tuple[UUID | None, str | None]:
    """A limit and a key to continue after."""
    if after is None:
        return None, None
    if not isinstance(after, tuple) or len(after) != 2:
        raise InvalidInput(f"got {after!r}", field="after", allowed="a limit and a key")
    return parse_uuid(after[0], "after"), check_text(after[1], "after", None)


def _quota_place(after: object) -> tuple[UUID, str | None, int | None]:
    if not isinstance(after, QuotaPlace):
        raise InvalidInput(f"got {type(after).__name__}", field="after", allowed="the place an earlier page returned")
    number = None if after.number is None else check_int(after.number, "after.number", 0, 2**63 - 1)
    return parse_uuid(after.policy, "after.policy"), check_text(after.key, "after.key", None), number


def _policy_id(value: object, field: str = "quota_policy_id") -> QuotaPolicyId:
    return QuotaPolicyId(parse_uuid(value, field))


def _name(value: object) -> str:
    name = check_filled(value, "name")
    if any(category(letter) == "Cc" for letter in name):
        raise InvalidInput(
            f"contains a control character: {quoted(name)}", field="name", allowed="names without control characters"
        )
    return name


def _window(value: object) -> int:
    ms = check_duration(value, "window", least_ms=0, most=MAX_WINDOW)
    if ms % 1000:
        raise InvalidInput(f"got {value}", field="window", allowed="whole seconds")
    return ms // 1000
