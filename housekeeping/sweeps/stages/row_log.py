"""The log line for each changed row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RowLog:
    """A log line for each record that was changed.

    Attributes:
      event: Its text.
      fields: Log field -> key of the record (see `TableStage.columns`).
      constants: Log field -> value.
      level: One of logging's.
    """

    event: str
    fields: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    level: int = logging.INFO
