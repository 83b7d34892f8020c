"""Command line with the shortened waits of the suite, held at its points: ``python -m tests.chaos.command serve``."""

from __future__ import annotations

import faulthandler
import signal

from tests.chaos.shortened import shorten_if_asked

shorten_if_asked()

from tests.chaos import points  # noqa: E402
from tests.internals.cli import main  # noqa: E402

if __name__ == "__main__":
    points.install()
    # The suite asks for the stacks of all threads when a wait times out.
    faulthandler.register(signal.SIGUSR1)
    main()
