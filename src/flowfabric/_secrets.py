"""Removes passwords in database addresses from text."""

from __future__ import annotations

import re
from typing import Final

# Up to the last @ of the word: a password that was not percent-encoded may contain any of /?#@.
_URL_SECRET: Final = re.compile(r"(?P<keep>[a-z][a-z0-9+.-]*://[^\s:/@]*):\S*@", re.IGNORECASE)
_WORD_SECRET: Final = re.compile(r"(?P<keep>\b(?:ssl)?password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)


def redact(text: str) -> str:
    """Return the text without passwords, in either DSN form (`scheme://user:secret@`, `password=secret`)."""
    text = _URL_SECRET.sub(r"\g<keep>:***@", text)
    return _WORD_SECRET.sub(r"\g<keep>***", text)
