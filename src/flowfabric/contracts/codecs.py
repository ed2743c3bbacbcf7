"""Codecs: compress or encrypt bytes on their way to the database and back."""

from __future__ import annotations

import base64
import inspect
import re
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, cast
from uuid import UUID

from flowfabric.contracts.misfits import type_name
from flowfabric.errors import Corruption, InvalidInput
from flowfabric.values.checks import MAX_PAYLOAD, TEXT_MAX_BYTES

_CODEC_NAME: Final = re.compile(r"[a-z0-9_-]+")
_PLAIN: Final = "json"
_BOUND: Final = "@"  # after the name of a codec that has bound the data to its execution
_SEALED: Final = "[sealed "
SEALED: Final = "[sealed]"


class CannotDecode(Corruption):
    """Stored arguments or a stored result no longer fit the code, or a codec cannot read them.

    `what` names the argument, result or step. The message says what is wrong and never shows the data. Of a frame in
    `run.stream()`, `cursor` is its position: a reader may continue after it.
    """

    def __init__(self, problem: str, *, what: str | None = None, execution_id: UUID | None = None) -> None:
        self.what = what
        self.cursor: str | None = None
        self.problem = problem
        super().__init__(problem if what is None else f"{what}: {problem}", execution_id=execution_id)

    def _message(self) -> str:
        return self.detail  # without its kind, `corruption`: most often the code has changed, not the data


class Codec(Protocol):
    """Transforms stored bytes and back: compression, encryption.

    `name` (`[a-z0-9_-]+`) is stored beside the data and must keep its meaning as long as such data exists.
    Several threads may call both methods at the same time. `decode` also gets bytes that callers sent, and a few of
    them may open to many: one that decompresses should also take `max_length`, stop there, and raise.
    """

    @property
    def name(self) -> str: ...

    def encode(self, data: bytes) -> bytes: ...

    def decode(self, data: bytes) -> bytes: ...


class BindingCodec(Protocol):
    """A codec that binds data to its execution (authenticated encryption): copied to another one, it is unreadable.

    `binds` is True. Both methods get the id of the execution too; None for data that belongs to no execution yet, the
    arguments of a schedule. `decode` raises if data and id do not belong together.
    """

    @property
    def name(self) -> str: ...

    @property
    def binds(self) -> Literal[True]: ...

    def encode(self, data: bytes, execution_id: UUID | None, /) -> bytes: ...

    def decode(self, data: bytes, execution_id: UUID | None, /) -> bytes: ...


AnyCodec: TypeAlias = Codec | BindingCodec


class Codecs:
    """The codecs of an app: applied in order when writing; the names stored beside the data choose them when reading.

    `also_read` are retired codecs: they read old data and write nothing. Without `accept_plain` data is refused that no
    codec that binds has written.
    """

    def __init__(
        self, codecs: Sequence[AnyCodec] = (), *, also_read: Sequence[AnyCodec] = (), accept_plain: bool = True
    ) -> None:
        self._writing = tuple(codecs)
        self._reading: dict[str, AnyCodec] = {}
        self._accepts_plain = accept_plain
        for field, group in (("codecs", self._writing), ("also_read", tuple(also_read))):
            for codec in group:
                name = _codec_name(codec, field)
                if name in self._reading:
                    raise InvalidInput(f"two codecs are named {name!r}", field=field, allowed="one codec per name")
                self._reading[name] = codec
        self._bounded = {name for name, codec in self._reading.items() if _takes_max_length(codec)}
        self.binds = any(map(_binds, self._writing))
        if accept_plain not in (True, False) or not (accept_plain or self.binds):
            raise InvalidInput(
                f"got {accept_plain!r} with codecs that do not bind",
                field="accept_plain",
                allowed="True, or False with a codec that binds data to its execution",
            )
        self._encoding = "+".join((_PLAIN, *(codec.name for codec in self._writing))) if self._writing else None
        self._bound_encoding = "+".join((_PLAIN, *(_stored_name(codec) for codec in self._writing)))
        if len(self._bound_encoding) > TEXT_MAX_BYTES:
            raise InvalidInput(
                f"the names together are {len(self._bound_encoding)} bytes long",
                field="codecs",
                allowed=f"at most {TEXT_MAX_BYTES} bytes with {_PLAIN!r} and the plus signs",
            )

    @property
    def is_plain(self) -> bool:
        """Whether data is stored as plain JSON, readable for anyone with access to the database."""
        return not self._writing

    def seal(self, data: bytes, execution_id: UUID | None) -> tuple[bytes, str | None]:
        """Return the bytes to store and the encoding to store beside them; None means plain JSON.

        `execution_id`: the execution that the data belongs to; None if it belongs to none yet.
        """
        for codec in self._writing:
            if _binds(codec):
                data = cast(BindingCodec, codec).encode(data, execution_id)
            else:
                data = cast(Codec, codec).encode(data)
            if not isinstance(data, bytes):
                raise InvalidInput(
                    f"{codec.name!r} encoded to {type_name(data)}", field="codecs", allowed="encode() returns bytes"
                )
        return data, self._encoding if execution_id is None else self._bound_encoding

    def open(
        self, data: bytes, encoding: str | None, execution_id: UUID | None, *, max_length: int = MAX_PAYLOAD
    ) -> bytes:
        """Undo `seal`. Raises `CannotDecode`, which never shows the data.

        Codecs that take `max_length` return at most that many bytes; what others return is not limited here.
        """
        if encoding is None:
            encoding = _PLAIN
        plain, *names = encoding.split("+")
        if plain != _PLAIN:
            raise CannotDecode(f"encoding {encoding!r} is not {_PLAIN!r} with the names of codecs")
        chosen = []
        for stored in reversed(names):
            codec = self._reading.get(stored.removesuffix(_BOUND))
            if codec is None:
                raise CannotDecode(f"there is no codec {stored!r} (encoding {encoding!r})")
            chosen.append((stored, codec))
        if not self._accepts_plain and not any(_binds(codec) for _, codec in chosen):
            raise CannotDecode(f"is not encrypted, and this app accepts nothing else (encoding {encoding!r})")
        if len({name.removesuffix(_BOUND) for name in names}) < len(names):
            raise CannotDecode(f"encoding {encoding!r} names a codec twice")  # `seal` never does
        for name, codec in chosen:
            given: Any = {"max_length": max_length} if name.removesuffix(_BOUND) in self._bounded else {}
            try:
                if _binds(codec):
                    bound_to = execution_id if name.endswith(_BOUND) else None
                    data = cast(BindingCodec, codec).decode(data, bound_to, **given)
                else:
                    data = cast(Codec, codec).decode(data, **given)
            except Exception as error:  # its text may quote the data
                problem: str | None = f"cannot read the data ({type(error).__name__})"
            else:
                problem = None if isinstance(data, bytes) else f"decoded to {type_name(data)}, not to bytes"
            if problem is not None:
                raise CannotDecode(f"codec {name!r} {problem} (encoding {encoding!r})")
        return data

    def seal_text(self, text: str, execution_id: UUID | None) -> str:
        """Return a text to store where only text can be stored: as it is without codecs, else sealed."""
        if self.is_plain:
            return text
        sealed, encoding = self.seal(text.encode(), execution_id)
        return f"{_SEALED}{encoding}] {base64.b64encode(sealed).decode()}"

    def open_text(self, text: str, execution_id: UUID | None) -> str:
        """Undo `seal_text`. Text that no codec here can open is returned as `shown` shows it."""
        if not text.startswith(_SEALED):
            return text
        encoding, _, data = text.removeprefix(_SEALED).partition("] ")
        try:
            return self.open(base64.b64decode(data, validate=True), encoding, execution_id).decode()
        except (CannotDecode, ValueError):
            return shown(text)

    def __repr__(self) -> str:
        return f"Codecs({self._encoding or _PLAIN})"


def shown(text: str) -> str:
    """Return a stored text for a reader without codecs: `[sealed]` in place of a sealed one."""
    return SEALED if text.startswith(_SEALED) else text


def _binds(codec: AnyCodec) -> bool:
    return getattr(codec, "binds", False) is True


def _takes_max_length(codec: AnyCodec) -> bool:
    try:
        return "max_length" in inspect.signature(codec.decode).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return False


def _stored_name(codec: AnyCodec) -> str:
    return codec.name + _BOUND if _binds(codec) else codec.name


def _codec_name(codec: AnyCodec, field: str) -> str:
    name = getattr(codec, "name", None)
    if not isinstance(name, str) or not _CODEC_NAME.fullmatch(name) or name == _PLAIN:
        raise InvalidInput(
            f"a codec is called {name!r}", field=field, allowed=f"{_CODEC_NAME.pattern}, other than {_PLAIN!r}"
        )
    return name
