"""Numbers with their nouns, singular or plural."""

from __future__ import annotations


def counted(number: float, noun: str, nouns: str | None = None) -> str:
    """Return the number and its noun: ``1 error``, ``0 errors``, ``1,234 queries``.

    Parameters:
      nouns: The plural, if it is not the noun followed by an s.
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"
