"""Many rows of a table in one test: `each` takes the arguments of `pytest.mark.parametrize` and loops instead."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Rows:
    """Lets a test continue after a row that failed, and fails it at the end with all of them, each named in a note."""

    def __init__(self) -> None:
        self._failures: list[Exception] = []

    @contextlib.contextmanager
    def row(self, name: object) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"with {name!r}")
            self._failures.append(error)

    def tell(self) -> None:
        if len(self._failures) == 1:
            raise self._failures[0]
        if self._failures:
            raise ExceptionGroup("rows that failed", self._failures)


def each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Run the test with every row of the table."""
    arguments = (names,) if isinstance(names, str) else names
    table = [dict(zip(arguments, (row,) if len(arguments) == 1 else row, strict=True)) for row in rows]
    assert table, "a test without a row tests nothing"

    def decorate(test: Callable[..., Any]) -> Any:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run_async(**fixtures: Any) -> None:
                all_rows = Rows()
                for row in table:
                    with all_rows.row(row):
                        await test(**fixtures, **row)
                all_rows.tell()

            run: Any = run_async
        else:

            @functools.wraps(test)
            def run_sync(**fixtures: Any) -> None:
                all_rows = Rows()
                for row in table:
                    with all_rows.row(row):
                        test(**fixtures, **row)
                all_rows.tell()

            run = run_sync
        fixtures = [p for name, p in inspect.signature(test).parameters.items() if name not in arguments]
        run.__signature__ = inspect.Signature(fixtures)
        return run

    return decorate
