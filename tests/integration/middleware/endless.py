"""Run that hangs in Python code."""

from __future__ import annotations

import threading
from typing import Final

from tests.internals.core import LostLease

LONG_ENOUGH_S: Final = 60


class Endless:
    """Run that continues until it is interrupted."""

    def __init__(self) -> None:
        self.interrupted = False

    def __call__(self) -> None:
        never = threading.Event()
        try:
            for _ in range(LONG_ENOUGH_S * 100):
                never.wait(0.01)
        except LostLease:
            self.interrupted = True
            raise
