"""Keeps passwords out of everything a person or a log might see."""

from __future__ import annotations

import re
from typing import Final

#: ``scheme://user:password@`` anywhere in a text; the password may hold anything but white space and ``@``.
_URL_PASSWORD: Final = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s@]+(?=@)", re.IGNORECASE)
#: ``password=...`` as libpq writes it, and the query parameters of object stores and brokers.
_NAMED_SECRET: Final = re.compile(
    r"(?P<before>(?:password|passwd|secret[a-z_]*|token|api_?key|access_key[a-z_]*)\s*[=:]\s*[\"']?)[^\s&\"',}]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text with every password in it replaced by ``***``; user, host and path stay readable."""
    return _NAMED_SECRET.sub(r"\g<before>***", _URL_PASSWORD.sub(r"\g<before>***", text))
