"""What an examination finds, for `housekeeping doctor`; workers may add their own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["fine", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      level: ``warning``: works, but not as it should, or not for long; ``error``: does not work.
      area: Which part of the installation: ``postgres``, ``redis``, ``broker``, or a worker's name.
      subject: What was looked at, in a few words.
      text: What was found.
      way_out: What to do; null where there is nothing to do.
    """

    level: Level
    area: str
    subject: str
    text: str
    way_out: str | None = None

    def as_json(self) -> dict[str, Any]:
        """One element of ``findings`` in ``housekeeping doctor --json``."""
        return asdict(self)
