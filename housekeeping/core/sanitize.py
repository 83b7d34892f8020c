"""Text that is safe to show: without secrets, without control characters, short enough for a line."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

_KEPT: Final = frozenset("\n ")
_SCHEME: Final = r"[a-z][a-z0-9+.-]{0,30}://"
#: ``scheme://user:password@`` anywhere in a text. A password may contain characters that should have been
#: percent-encoded, so it extends to the last ``@`` before white space or the next URL.
_URL_PASSWORD: Final = re.compile(rf"(?P<before>{_SCHEME}[^\s:/@]*:)(?:(?!{_SCHEME})\S)+(?=@)", re.IGNORECASE)
#: ``password=...`` of libpq, ``"password": "..."``, and the parameters of object stores and brokers.
_NAMED_SECRET: Final = re.compile(
    r"(?P<before>(?:passw(?:or)?d|secret|token|signature|credential|(?:api|access|account)[_-]?key)[a-z_-]{0,40}"
    r"[\"']?\s*[=:]\s*)(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\"']\S+|[^\s&\"']+)",
    re.IGNORECASE,
)
#: How libpq begins the line of each host that it has tried.
_ATTEMPT: Final = "connection to server "


def mask_secrets(text: str) -> str:
    """Replace every password in the text by ``***``; user, host and path stay readable."""
    if "://" in text:
        text = _URL_PASSWORD.sub(r"\g<before>***", text)
    return _NAMED_SECRET.sub(r"\g<before>***", text)


def printable(text: str) -> str:
    """Write every character that is not plainly visible as an escape: ``\\x1b``, ``\\u202e``.

    A terminal obeys control characters: they can hide lines, change the window's title, or paste commands. Line ends
    stay, and tabs become spaces.
    """
    if text.isprintable():  # most texts; a page has thousands
        return text
    return "".join(_visible(character) for character in text.expandtabs(4))


def in_one_line(text: str, width: int) -> str:
    """Return the text `printable`, its line ends escaped, cut to `width` characters with an ellipsis."""
    # Cut twice, because escapes are longer than what they replace.
    line = printable(text[: width + 1].replace("\n", "\\n").replace("\t", " "))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def shortened(text: str, width: int) -> str:
    """Return the text with its middle left out if it is longer than `width` characters.

    The end is kept because an error that quotes a name explains the problem after it.
    """
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[: width - 1 - half]}…{text[-half:]}"


def error_line(error: BaseException) -> str:
    """Return the first line of the error's text, passwords masked; the name of its type if it has no text."""
    if isinstance(error, KeyError):
        return typed_error_line(error)  # the text of a KeyError is the key alone
    return _first_line(error) or type(error).__name__


def typed_error_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text, passwords masked."""
    line = _first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _first_line(error: BaseException) -> str:
    return first_line(str(error))


def first_line(text: str) -> str:
    """Return the first line of a text in a form that PostgreSQL can store, passwords masked.

    If libpq has tried several hosts, its text has a line for each. All of them are returned: the first host may be only
    a replica, and the second one the primary that has failed.
    """
    lines = text.strip().splitlines()
    if not lines:
        return ""
    attempts = [line for line in lines if line.startswith(_ATTEMPT)]
    line = "; ".join(attempts) if lines[0] in attempts else lines[0]
    # Escaped because PostgreSQL stores neither NUL nor lone surrogates, and the line is stored in the ledger.
    storable = line.replace("\0", r"\x00").encode(errors="backslashreplace").decode()
    return mask_secrets(storable)


def _visible(character: str) -> str:
    if character in _KEPT or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


#: Types whose values are written out.
_WRITTEN_OUT: Final = bool | int | float | str | bytes | list | tuple | dict | set | frozenset | timedelta


def described(value: object, most: int = 60) -> str:
    """Return a wrong value as text for an error. An object whose text may need a query is shown by its type."""
    if value is None or isinstance(value, type | _WRITTEN_OUT):
        return repr(value)[:most]
    if (name := getattr(value, "__name__", None)) is not None and callable(value):
        return "a lambda" if name == "<lambda>" else f"the function {name}"
    return f"an object of type {type(value).__name__}"
