"""Cursors that were not given by the server: their seal is no secret, so anybody can write one."""

from __future__ import annotations

from types import SimpleNamespace

from flowfabric.server import cursors
from flowfabric.server.answers import Writer
from flowfabric.server.operation import Operation
from flowfabric.server.operations import OPERATIONS
from flowfabric.server.requests import Reader
from tests.each import Rows
from tests.server.examples import path_of
from tests.server.keyed import Keyed
from tests.server.test_namespaces import a_target

LISTS = [one for one in OPERATIONS if "cursor" in one.query.__struct_fields__]
GARBAGE = (
    "x", " ", "-1", "²", "9" * 19, "9" * 40, "9" * 5000, "0-0", "{}", "[]", "null", '["x","y"]', "\x00", "é", "1.5",
    '["0001-01-01T00:00:00-23:59","0b0e8400-e29b-41d4-a716-446655440000"]', "0001-01-01T00:00:00+23:59 0123456789ab",
    "a\x00b", "[[1]]", "1e999", "true", "0b0e8400-e29b-41d4-a716-446655440000", "2030-01-01T00:00:00Z", '{"a":1}',
    '"x"',     "WyJ4Il0=", "AAAA", "99999-12-31T00:00:00Z x", "e1-5", "1-1-1", "1:2", "1:2:3", "x" * 3000,
)  # fmt: skip


def forged(operation: Operation, url: str, text: str) -> str:
    """A cursor with a seal that fits."""
    reader = Reader(operation)
    template = operation.path.split("/")
    values = [one for name, one in zip(template, url.split("/"), strict=True) if name.startswith("{")]
    call = SimpleNamespace(path=reader.path(values), query=reader.query(b""), namespace=None)
    return cursors.seal(text, *Writer(operation).filters(call))  # type: ignore[arg-type]


async def test_no_list_fails_because_of_a_cursor(keyed: Keyed) -> None:
    client = await keyed.client("admin")
    ids = await a_target(keyed.engine)
    rows = Rows()
    assert len(LISTS) > 10
    for operation in LISTS:
        url = path_of(operation, ids)
        for text in GARBAGE:
            with rows.row((operation.name, text[:60])):
                answer = await client.get(url, params={"cursor": forged(operation, url, text)})
                assert answer.status_code in (200, 400, 404, 422), answer.text
    rows.tell()
