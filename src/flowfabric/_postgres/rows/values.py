"""The type of a row, and how its JSON is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Row = Mapping[str, Any]

DECODER = msgspec.json.Decoder()


def decode_json(text: str | None) -> Any:
    return None if text is None else DECODER.decode(text)
