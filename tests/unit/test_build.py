"""The version of the functions: stated once, and raised with every change after a release."""

from __future__ import annotations

import pytest

from flowfabric._postgres import build
from flowfabric._postgres.build import THIS, Build, check_build
from flowfabric.errors import ConnectionFailed


def test_the_stated_version_is_right() -> None:
    stated = build.stated()
    assert 1 <= stated.oldest <= stated.version
    assert all(version <= stated.version for version in stated.released)
    assert stated.released.get(stated.version, THIS.digest) == THIS.digest, (
        "the functions have changed since this version was released: raise `version` in sql/version.json"
    )


@pytest.mark.parametrize(
    ("version", "oldest", "kind"),
    [
        (THIS.version, THIS.version, None),
        (THIS.version + 3, THIS.version, None),
        (THIS.version + 3, THIS.version - 1, None),
        (THIS.version + 3, THIS.version + 1, "schema_newer"),
        (THIS.version - 1, THIS.version - 1, "schema_older"),
        (0, 0, "schema_older"),
    ],
)
def test_a_process_works_with_functions_of_its_version_and_newer_ones_that_serve_it(
    version: int, oldest: int, kind: str | None
) -> None:
    found = Build(version, oldest, "any")
    assert found.serves(THIS) == (kind is None)
    if kind is None:
        check_build(found)
    else:
        with pytest.raises(ConnectionFailed) as refused:
            check_build(found)
        assert refused.value.kind == kind
