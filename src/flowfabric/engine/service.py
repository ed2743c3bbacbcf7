"""The engine as a service: connect, prepare, read the clock, shut down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

import asyncpg

from flowfabric import settings
from flowfabric._postgres import statements
from flowfabric._postgres.build import Build
from flowfabric._postgres.database import (
    LOST,
    Database,
    check_deployment,
    check_server,
    connection_failed,
    translate,
)
from flowfabric._postgres.dsn import check_dsn, describe
from flowfabric._postgres.listen import Listener
from flowfabric._postgres.migrate import Migration, current_migration, current_version, migrate
from flowfabric._postgres.outage import Outage
from flowfabric._postgres.roles import Role
from flowfabric.engine.base import Operations
from flowfabric.engine.checks import check_duration, check_int
from flowfabric.errors import FlowFabricError, TimedOut, TransportError
from flowfabric.values.checks import check_lane
from flowfabric.values.lane import Prepared

VERSION = (0, 1, 0)
_PRESENT = [
    "cancel_execution",
    "change_priority",
    "replay_execution",
    "revoke_lease",
    "read_execution_state",
    "read_execution_info",
    "get_execution_result",
    "issue_reclaim_grant",
    "prepare",
    "list_expired_leases",
    "block_execution_for_admission",
    "rotate_waitpoint_hmac_secret_all",
    "seed_waitpoint_hmac_secret",
    "list_pending_waitpoints",
    "cancel_flow_header",
    "cancel_flow_wait_timeout",
    "cancel_flow_wait_indefinite",
    "ack_cancel_member",
    "register_worker",
    "heartbeat_worker",
    "mark_worker_dead",
    "list_workers",
    "claim_for_worker",
    "budget_admin",
    "quota_admin",
    "release_admission",
    "read_quota_policy_limits",
    "read_budget_usage_and_limits",
    "stream_durable_summary",
    "stream_best_effort_live",
    "subscribe_lease_history",
    "subscribe_completion",
    "subscribe_signal_delivery",
    "subscribe_operator_events",
    "subscribe_worker_events",
    "follow",
    "consume",
    "fork_execution",
]
_LATER = [
    "subscribe_instance_tags",
]


class Service(Operations):
    """connect, close, prepare, ping, server_time_ms, capabilities, backend_label, shutdown_prepare."""

    _embedded: Any = None
    _dsn: str = ""

    @classmethod
    async def connect(
        cls,
        dsn: str | None = None,
        *,
        data_dir: Path | str | None = None,
        min_size: int = 1,
        max_size: int = 10,
        command_timeout: timedelta = timedelta(seconds=60),
        reconnect_for: timedelta = timedelta(seconds=15),
        notifications: bool = True,
        prepared_statements: bool = True,
        stream_ops: int = 64,
    ) -> Self:
        """Connect to a deployment.

        Without `dsn` the environment's `FLOWFABRIC_DSN` is used, and without that the embedded server, which this
        call then starts and migrates. It never migrates your own database: the error says what to run.
        `notifications=False, prepared_statements=False` suits a transaction-pooling proxy. `stream_ops` is how many
        calls of `read_stream` and `tail_stream` may run at the same time.
        """
        check_int(min_size, "min_size", 0, 10_000)
        check_int(max_size, "max_size", max(min_size, 1), 10_000)
        check_int(stream_ops, "stream_ops", 1, 100_000)
        check_duration(command_timeout, "command_timeout")
        check_duration(reconnect_for, "reconnect_for", least_ms=0)
        # An argument wins over the environment: a data directory means the server in it.
        chosen = dsn or (settings.load().dsn if data_dir is None else None)
        server = None
        if chosen is None:
            server = await _start_embedded(None if data_dir is None else Path(data_dir))
            chosen = server.dsn
        try:
            if server is not None:
                await migrate_database(chosen, unless_current=True)
            database = await Database.connect(
                chosen,
                min_size=min_size,
                max_size=max_size,
                command_timeout=command_timeout.total_seconds(),
                reconnect_for=reconnect_for.total_seconds(),
                prepared_statements=prepared_statements,
            )
        except BaseException:
            if server is not None:
                await asyncio.to_thread(server.release)
            raise
        engine = cls(database, Listener(chosen) if notifications else None)
        engine._embedded = server
        engine._dsn = chosen
        engine._stream_ops.most = stream_ops
        return engine

    async def close(self) -> None:
        """Stop the duties and close the connections; the embedded server stops with its last user."""
        try:
            await self._tails.close()
            if self._followers is not None:
                await self._followers.close()
            for background in list(self._background):
                await background.stop()
        finally:
            try:
                if self._listener is not None:
                    await self._listener.close()
            finally:
                try:
                    await self._database.close()
                finally:
                    if self._embedded is not None:
                        server, self._embedded = self._embedded, None
                        await asyncio.to_thread(server.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def target(self) -> str:
        """The address of the database, without user and password."""
        return self._database.target

    @property
    def outage(self) -> Outage:
        """Whether the database can be reached, as this process knows it."""
        return self._database.outage

    @property
    def listener(self) -> Listener | None:
        """The listener for notifications of this engine."""
        return self._listener

    @property
    def dsn(self) -> str:
        """The DSN the engine was connected with, password included: for your own connections."""
        return self._dsn

    @property
    def instance(self) -> UUID:
        """The name of this engine's process: of its notifications, of what it leads and of what it registers."""
        return self._instance

    @property
    def flow_partitions(self) -> int:
        """How many partitions this deployment has; fixed at its setup."""
        return self._database.flow_partitions

    def attach(self, background: Any) -> None:
        """Register a runner of duties, for `shutdown_prepare`."""
        self._background.append(background)

    def detach(self, background: Any) -> None:
        """Unregister it."""
        with contextlib.suppress(ValueError):
            self._background.remove(background)

    async def prepare(self) -> Prepared:
        """Register the configured lanes. Safe to call repeatedly."""
        lanes = [check_lane(lane, "FLOWFABRIC_LANES") for lane in settings.load().lanes]
        row = await self._row(statements.REGISTER_LANES, lanes, repeatable=True)
        return Prepared(f"registered {row['made']} lanes" if row["made"] else None)

    async def ping(self) -> None:
        """Make one round trip; raises `TransportError` if the database does not answer."""
        await self._row(statements.PING)

    async def server_time_ms(self) -> int:
        """Return the database's clock, the only one that counts, in milliseconds since the epoch."""
        row = await self._row(statements.SERVER_TIME_MS, repeatable=True)
        if row["ms"] < 0:
            raise TransportError("protocol", "the server's clock is before 1970")
        return int(row["ms"])

    @staticmethod
    def backend_label() -> str:
        """The family of the storage, for metrics."""
        return "postgres"

    @staticmethod
    def capabilities() -> dict[str, Any]:
        """Return which features this version has, without I/O."""
        supports = dict.fromkeys(_PRESENT, True) | dict.fromkeys(_LATER, False)
        major, minor, patch = VERSION
        return {
            "identity": {
                "family": "postgres",
                "version": {"major": major, "minor": minor, "patch": patch},
                "stage": "alpha",
            },
            "supports": supports,
        }

    async def shutdown_prepare(self, grace: timedelta = timedelta(seconds=15)) -> None:
        """Stop the duties of this engine: each may finish its round; after `grace` it raises `TimedOut`.

        Tails return what they have, new reads of streams are refused, and subscriptions end with `StreamDisconnected`.
        """
        check_duration(grace, "grace", least_ms=0)
        begun = time.monotonic()
        self._stream_ops.is_closing = True
        self._tails.end_waits()
        if self._followers is not None:
            await self._followers.close()
        drained = await asyncio.gather(*(background.stop(grace) for background in list(self._background)))
        left = max(begun + grace.total_seconds() - time.monotonic(), 0)
        if not await self._stream_ops.drained(left) or not all(drained):
            raise TimedOut("shutdown_prepare", int((time.monotonic() - begun) * 1000))


def embedded_place(service: Service) -> Path | None:
    """Where the embedded server of an engine has its data; None if it uses another server."""
    return None if service._embedded is None else Path(service._embedded.data_dir)


async def connects_as_owner(service: Service) -> bool:
    """Whether the engine's database user owns the schema, and so may do everything in it."""
    return bool((await service._row(statements.IS_OWNER, repeatable=True))["is_owner"])


async def check_schema(service: Service) -> int:
    """Return the version of the schema; `TransportError` if there is none with which this process can work now."""
    found = await service._fetch(statements.DEPLOYMENT_INFO)
    row = found[0] if found else None
    check_deployment(row, service.target)
    return int(found[0]["schema_version"])


async def revive_embedded(place: Path) -> Literal["", "died", "shutting_down"]:
    """Start an embedded server again that died or is shutting down; returns what was wrong if this call did."""
    from flowfabric.embedded import server as embedded  # noqa: PLC0415 - not importable on every platform

    return await asyncio.to_thread(embedded.revive, place)


async def _start_embedded(data_dir: Path | None) -> Any:
    try:
        from flowfabric.embedded import server as embedded  # noqa: PLC0415 - not importable on every platform, seldom needed
    except ImportError as error:
        raise TransportError("other", f"no embedded server on this platform ({error}); set FLOWFABRIC_DSN") from error
    starting = asyncio.ensure_future(asyncio.to_thread(embedded.start, data_dir))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread continues; nothing uses the server it starts.
        starting.add_done_callback(lambda done: None if done.exception() else done.result().release())
        raise


async def _open(dsn: str) -> asyncpg.Connection[Any]:
    check_dsn(dsn)
    try:
        return await asyncpg.connect(dsn, timeout=30)
    except FlowFabricError:
        raise
    except Exception as error:
        raise connection_failed(error, describe(dsn)) from error


async def migrate_database(
    dsn: str,
    *,
    read_roles: Sequence[str] = (),
    submit_roles: Sequence[str] = (),
    worker_roles: Sequence[str] = (),
    operate_roles: Sequence[str] = (),
    force: bool = False,
    unless_current: bool = False,
) -> Migration:
    """Bring the schema of a database up to date; safe to run from many processes at the same time.

    Each database role that is named may call the functions of its kind, now and after later migrations.
    Functions that are newer than this package's stay as they are, unless `force`. `unless_current`: do nothing if
    schema and functions are those of this package; otherwise the functions are replaced all the same.
    """
    roles = {
        Role.READ: read_roles,
        Role.SUBMIT: submit_roles,
        Role.WORK: worker_roles,
        Role.OPERATE: operate_roles,
    }
    connection = await _open(dsn)
    try:
        check_server(connection, describe(dsn))
        if unless_current and (current := await current_migration(connection)) is not None:
            return current
        return await migrate(connection, roles=roles, force=force)
    except (asyncpg.PostgresError, *LOST) as error:
        raise translate(error, describe(dsn)) from error
    finally:
        await connection.close()


async def schema_version(dsn: str) -> int:
    """Return the version of the schema in a database; 0 without a schema."""
    return (await schema_build(dsn))[0]


async def schema_build(dsn: str) -> tuple[int, Build | None]:
    """Return the version of the schema in a database and the build of its functions; (0, None) without a schema."""
    connection = await _open(dsn)
    try:
        return await current_version(connection)
    except (asyncpg.PostgresError, *LOST) as error:
        raise translate(error, describe(dsn)) from error
    finally:
        await connection.close()
