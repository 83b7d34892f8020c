"""Findings of `housekeeping doctor`; workers may add their own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["fine", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
      level: ``warning``: works, but not correctly, or not for long; ``error``: does not work.
      area: The part of the installation: ``postgres``, ``redis``, ``broker``, or a worker's name.
      subject: The thing checked, in a few words.
      text: The result.
      way_out: What to do; None if there is nothing to do.
    """

    level: Level
    area: str
    subject: str
    text: str
    way_out: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``findings`` in ``housekeeping doctor --json``."""
        return asdict(self)
