"""Submit through Django, on PostgreSQL with psycopg 3: inside `transaction.atomic()` or in autocommit.

The connection is an alias of `DATABASES`, or a connection of `django.db.connections`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from flowfabric.bridges._submission import Fields, Rows, Verdict, missing, one, only, run, submission
from flowfabric.errors import InvalidInput
from flowfabric.values.execution import Created, Duplicate, NewExecution

try:
    from django.db import connections
except ImportError as error:
    raise missing("Django", "django") from error


def create_execution(
    connection: Any = "default", *, wake: bool = True, **fields: Unpack[Fields]
) -> Created | Duplicate:
    """Submit one execution as part of the connection's transaction. The fields are those of `NewExecution`."""
    return only(create_many(connection, one(**fields), wake=wake))


def create_many(connection: Any, items: Sequence[NewExecution], *, wake: bool = True) -> list[Verdict]:
    """Submit up to 1,000 executions; one verdict per item, a refused one as the exception it would have raised."""
    found = connections[connection] if isinstance(connection, str) else connection
    if getattr(found, "vendor", None) != "postgresql" or found.Database.__name__ != "psycopg":
        raise InvalidInput(
            f"got {type(found).__qualname__}", field="connection", allowed="a PostgreSQL connection through psycopg 3"
        )

    def execute(statement: str, args: list[Any]) -> Rows:
        with found.cursor() as cursor:
            cursor.execute(statement, args)
            rows: Rows = cursor.fetchall()
            return rows

    return run(submission(items, "%s", wake=wake), execute)
