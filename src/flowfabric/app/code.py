"""Which code a handler is: its versions, and a digest of its source.

Workers that have the same handler have the same digest, on every machine. An execution that changed code stopped is
given to workers with another digest.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from flowfabric.errors import InvalidInput

_PLAIN = (str, bytes, int, float, bool, type(None))


def checked_versions(version: object, compatible_with: object) -> tuple[int, ...]:
    """Return the versions that a task serves, first its own; none for a task without a version."""
    own = () if version is None else (_checked(version, "version"),)
    allowed = "a list of earlier versions"
    if isinstance(compatible_with, str | bytes) or not isinstance(compatible_with, Collection):
        raise InvalidInput(f"got {compatible_with!r}", field="compatible_with", allowed=allowed)
    others = tuple(_checked(one, "compatible_with") for one in compatible_with)
    if others and not own:
        raise InvalidInput("the task has no version", field="compatible_with", allowed="version=... beside it")
    if len({*own, *others}) < len(own) + len(others):
        raise InvalidInput(f"got {list(others)!r}", field="compatible_with", allowed=f"{allowed}, each once")
    return (*own, *others)


def _checked(value: object, field: str) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise InvalidInput(f"got {value!r}", field=field, allowed="an integer from 1")
    return value


def code_digest(function: Callable[..., Any]) -> str:
    """Return a digest of a handler: of its own code, and of the source file in which it is defined."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    if not hasattr(inner, "__code__"):
        inner = inspect.unwrap(type(inner).__call__)
    digest = hashlib.sha256()
    code = getattr(inner, "__code__", None)
    if isinstance(code, CodeType):
        for part in _parts(code):
            digest.update(part)
        digest.update(_source(code.co_filename))
    # Values from the enclosing function: two closures of one function may differ only there.
    around = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)]
    around += [*(getattr(inner, "__defaults__", None) or ()), *(getattr(inner, "__kwdefaults__", None) or {}).values()]
    digest.update(repr([each for each in around if isinstance(each, _PLAIN)]).encode())
    return digest.hexdigest()[:32]


def _parts(code: CodeType) -> Iterator[bytes]:
    """The parts of a code object, without its file and line numbers."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _parts(each)
        elif isinstance(each, frozenset):
            yield repr(sorted(map(repr, each))).encode()  # in an order that no hash decides
        else:
            yield repr(each).encode()


def _source(name: str) -> bytes:
    path = Path(name)
    try:
        found = path.stat()
        return _digest_of(path, found.st_mtime_ns, found.st_size)
    except OSError:  # a file of an archive, or none
        return b""


@functools.lru_cache(maxsize=256)
def _digest_of(path: Path, _changed: int, _size: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if it is empty
    except ValueError:
        return False
    return True
