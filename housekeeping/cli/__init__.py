"""Floor 4: the command line."""

from __future__ import annotations

from housekeeping.cli.main import main

__all__ = ["main"]
