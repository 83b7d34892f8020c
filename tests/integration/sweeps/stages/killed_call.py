"""A process that is killed after a call, before its batch is written: the seventh of seven rows, five a batch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from tests.integration.sweeps.orders import Order, sweep
from tests.internals.engine import run_sweep
from tests.internals.ledger import use_database


def asking(asked: Path) -> Callable[[Order], None]:
    """Writes down which orders it was asked for."""

    def ask(order: Order) -> None:
        with asked.open("a") as stream:
            stream.write(f"{order.id} ")

    return ask


def _killed_at_the_last(asked: Path) -> Callable[[Order], None]:
    ask = asking(asked)

    def call(order: Order) -> None:
        ask(order)
        if order.id == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


if __name__ == "__main__":
    use_database(Settings.load())
    run_sweep(sweep(_killed_at_the_last(Path(sys.argv[1]))), clock=ManualClock())
