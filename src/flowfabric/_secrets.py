"""Text without the passwords that addresses of databases hold."""

from __future__ import annotations

import re
from typing import Final

# Up to the last @ of the word: a password that was not percent-encoded may hold any of /?#@.
_URL_SECRET: Final = re.compile(r"(?P<keep>[a-z][a-z0-9+.-]*://[^\s:/@]*):\S*@", re.IGNORECASE)
_WORD_SECRET: Final = re.compile(r"(?P<keep>\b(?:ssl)?password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)


def redact(text: str) -> str:
    """The text without passwords, in either DSN form (`scheme://user:secret@`, `password=secret`)."""
    text = _URL_SECRET.sub(r"\g<keep>:***@", text)
    return _WORD_SECRET.sub(r"\g<keep>***", text)
