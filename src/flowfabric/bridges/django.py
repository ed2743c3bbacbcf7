"""Submit through Django, on PostgreSQL with psycopg 3: inside `transaction.atomic()` or in autocommit.

The connection is an alias of `DATABASES` (`default` unless given), or a connection of `django.db.connections`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from flowfabric.bridges import _submission
from flowfabric.bridges._submission import Driver, Fields, Rows, Verdict, at_once, blocking, missing, one, only, wrong
from flowfabric.values.execution import Created, Duplicate, NewExecution

try:
    from django.db import connections
except ImportError as error:
    raise missing("Django", "django") from error


def create_execution(
    connection: Any = "default", *, wake: bool = True, **fields: Unpack[Fields]
) -> Created | Duplicate:
    """Submit one execution as part of the connection's transaction. The fields are those of `NewExecution`."""
    return only(at_once(_submission.create_many(driver(connection), one(**fields), wake)))


def create_many(items: Sequence[NewExecution], connection: Any = "default", *, wake: bool = True) -> list[Verdict]:
    """Submit up to 1,000 executions; one verdict per item, a refused one as the exception it would have raised."""
    return at_once(_submission.create_many(driver(connection), items, wake))


def driver(connection: Any) -> Driver:
    found = connections[connection] if isinstance(connection, str) else connection
    if getattr(found, "vendor", None) != "postgresql" or found.Database.__name__ != "psycopg":
        raise wrong(found, "a PostgreSQL connection through psycopg 3")

    def run(statement: str, args: list[Any]) -> Rows:
        with found.cursor() as cursor:
            cursor.execute(statement, args)
            rows: Rows = cursor.fetchall()
            return rows

    return blocking("%s", run)
