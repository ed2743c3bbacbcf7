"""Links that carry the right to signal."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final
from uuid import UUID

from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.values.ids import ExecutionId
from flowfabric.values.wait import WaitpointToken

_DIGEST: Final = re.compile("[0-9a-f]{64}")


class Callback(Struct, frozen=True):
    """The waitpoint a callback signals, and the token that allows it."""

    execution_id: ExecutionId
    waitpoint_id: UUID
    token: WaitpointToken


def callback_text(execution_id: ExecutionId, waitpoint_id: UUID, token: WaitpointToken | str) -> str:
    """Return execution, waitpoint and token as one string that is safe in a link. Anybody who has it can signal."""
    raw = token.reveal() if isinstance(token, WaitpointToken) else token
    kid, _, digest = raw.partition(":")
    data = execution_id.bytes + waitpoint_id.bytes
    if not kid.isascii() or not _DIGEST.fullmatch(digest) or not kid:
        raise InvalidInput("not a token", field="token", allowed="the token of a waitpoint")
    data += bytes.fromhex(digest) + kid.encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def parse_callback(text: object) -> Callback:
    """A callback from its text; `InvalidInput` when it is none. The token is verified when a signal is delivered."""
    wrong = InvalidInput("not a callback", field="callback", allowed="what callback_text gives")
    if not isinstance(text, str) or not 87 <= len(text) <= 200 or not text.isascii():
        raise wrong
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        kid, digest = data[64:].decode("ascii"), data[32:64].hex()
        if (
            len(data) < 65
            or callback_text(
                execution_id := ExecutionId(UUID(bytes=data[:16])),
                waitpoint_id := UUID(bytes=data[16:32]),
                token := WaitpointToken(f"{kid}:{digest}"),
            )
            != text
        ):
            raise wrong
    except (ValueError, binascii.Error):
        raise wrong from None
    return Callback(execution_id, waitpoint_id, token)
