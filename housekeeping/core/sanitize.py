"""Makes text of unknown origin safe to print."""

from __future__ import annotations

from typing import Final

_KEPT: Final = frozenset("\n ")


def printable(text: str) -> str:
    """The text with everything that is not plainly visible written out: ``\\x1b``, ``\\u202e``.

    A terminal obeys control characters: they can hide lines, retitle the window, or paste commands. Line ends stay,
    tabs become spaces.
    """
    return "".join(_visible(character) for character in text.expandtabs(4))


def in_one_line(text: str, width: int) -> str:
    """The text made `printable`, line ends too, and cut to `width` characters, with a sign that it was."""
    # Cut before and after, because what is written out is longer; the first time with some to spare.
    line = printable(text[: width + 1].replace("\n", "\\n").replace("\t", " "))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def shortened(text: str, width: int) -> str:
    """Return the text, its middle left out where it is longer than `width` characters.

    The end is kept because errors that quote a name say what is wrong after it.
    """
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[: width - 1 - half]}…{text[-half:]}"


def _visible(character: str) -> str:
    if character in _KEPT or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
