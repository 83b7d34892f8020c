"""What the chaos suite's processes run: the ready-made application, which can be held at any point of a run."""

from __future__ import annotations

import faulthandler
import signal

from tests.chaos.shortened import shorten_if_asked

shorten_if_asked()

from housekeeping.app import actors, broker  # noqa: E402
from tests.chaos import points  # noqa: E402

__all__ = ["actors", "broker"]

points.install(broker)
# Asked by the suite when it waits in vain: where each thread is, on the stderr that Dramatiq has not replaced.
faulthandler.register(signal.SIGUSR1, file=2)
