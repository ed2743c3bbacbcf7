"""Codecs: compress or encrypt bytes on their way to the database and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol
from uuid import UUID

from flowfabric.contracts.misfits import type_name
from flowfabric.errors import Corruption, InvalidInput
from flowfabric.values.checks import TEXT_MAX_BYTES

_CODEC_NAME: Final = re.compile(r"[a-z0-9_-]+")
_PLAIN: Final = "json"


class CannotDecode(Corruption):
    """Stored arguments or a stored result no longer fit the code, or a codec cannot read them.

    `what` names the argument, result or step. The message says what is wrong and never shows the data.
    """

    def __init__(self, problem: str, *, what: str | None = None, execution_id: UUID | None = None) -> None:
        self.what = what
        self.problem = problem
        super().__init__(problem if what is None else f"{what}: {problem}", execution_id=execution_id)


class Codec(Protocol):
    """Transforms stored bytes and back: compression, encryption.

    `name` (`[a-z0-9_-]+`) is stored beside the data and must keep its meaning as long as such data exists.
    Several threads may call both methods at the same time.
    """

    @property
    def name(self) -> str: ...

    def encode(self, data: bytes) -> bytes: ...

    def decode(self, data: bytes) -> bytes: ...


class Codecs:
    """The codecs of an app: applied in order when writing; the names stored beside the data choose them when reading.

    `also_read` are retired codecs: they read old data and write nothing.
    """

    def __init__(self, codecs: Sequence[Codec] = (), *, also_read: Sequence[Codec] = ()) -> None:
        self._writing = tuple(codecs)
        self._reading: dict[str, Codec] = {}
        for field, group in (("codecs", self._writing), ("also_read", tuple(also_read))):
            for codec in group:
                name = _codec_name(codec, field)
                if name in self._reading:
                    raise InvalidInput(f"two codecs are named {name!r}", field=field, allowed="one codec per name")
                self._reading[name] = codec
        self._encoding = "+".join((_PLAIN, *(codec.name for codec in self._writing))) if self._writing else None
        if self._encoding is not None and len(self._encoding) > TEXT_MAX_BYTES:
            raise InvalidInput(
                f"the names together are {len(self._encoding)} bytes long",
                field="codecs",
                allowed=f"at most {TEXT_MAX_BYTES} bytes with {_PLAIN!r} and the plus signs",
            )

    @property
    def is_plain(self) -> bool:
        """Whether data is stored as plain JSON, readable for anybody with access to the database."""
        return not self._writing

    def seal(self, data: bytes) -> tuple[bytes, str | None]:
        """Return the bytes to store and the encoding to store beside them; None means plain JSON."""
        for codec in self._writing:
            data = codec.encode(data)
            if not isinstance(data, bytes):
                raise InvalidInput(
                    f"{codec.name!r} encoded to {type_name(data)}", field="codecs", allowed="encode() returns bytes"
                )
        return data, self._encoding

    def open(self, data: bytes, encoding: str | None) -> bytes:
        """Undo `seal`. Raises `CannotDecode`, which never shows the data."""
        if encoding is None or encoding == _PLAIN:
            return data
        plain, *names = encoding.split("+")
        if plain != _PLAIN:
            raise CannotDecode(f"encoding {encoding!r} is not {_PLAIN!r} with the names of codecs")
        for name in reversed(names):
            codec = self._reading.get(name)
            if codec is None:
                raise CannotDecode(f"there is no codec {name!r} (encoding {encoding!r})")
            try:
                data = codec.decode(data)
            except Exception as error:  # its text may quote the data
                problem: str | None = f"cannot read the data ({type(error).__name__})"
            else:
                problem = None if isinstance(data, bytes) else f"decoded to {type_name(data)}, not to bytes"
            if problem is not None:
                raise CannotDecode(f"codec {name!r} {problem} (encoding {encoding!r})")
        return data

    def __repr__(self) -> str:
        return f"Codecs({self._encoding or _PLAIN})"


def _codec_name(codec: Codec, field: str) -> str:
    name = getattr(codec, "name", None)
    if not isinstance(name, str) or not _CODEC_NAME.fullmatch(name) or name == _PLAIN:
        raise InvalidInput(
            f"a codec is called {name!r}", field=field, allowed=f"{_CODEC_NAME.pattern}, other than {_PLAIN!r}"
        )
    return name
