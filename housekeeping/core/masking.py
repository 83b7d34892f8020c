"""Keeps passwords out of everything a person or a log might see."""

from __future__ import annotations

import re
from typing import Final

_SCHEME: Final = r"[a-z][a-z0-9+.-]{0,30}://"
#: ``scheme://user:password@`` anywhere in a text. A password may hold what a URL should have written in
#: percent form, so it goes on to the last ``@`` before white space or the next URL.
_URL_PASSWORD: Final = re.compile(rf"(?P<before>{_SCHEME}[^\s:/@]*:)(?:(?!{_SCHEME})\S)+(?=@)", re.IGNORECASE)
#: ``password=...`` as libpq writes it, ``"password": "..."``, and the parameters of object stores and brokers.
_NAMED_SECRET: Final = re.compile(
    r"(?P<before>(?:passw(?:or)?d|secret|token|signature|credential|(?:api|access|account)[_-]?key)[a-z_-]{0,40}"
    r"[\"']?\s*[=:]\s*)(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\"']\S+|[^\s&\"']+)",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text with every password in it replaced by ``***``; user, host and path stay readable."""
    if "://" in text:
        text = _URL_PASSWORD.sub(r"\g<before>***", text)
    return _NAMED_SECRET.sub(r"\g<before>***", text)
