"""Application of the chaos suite: ``housekeeping.app``, which can be held at defined points of a run."""

from __future__ import annotations

import faulthandler
import signal

import dramatiq

from tests.chaos.shortened import shorten_if_asked

shorten_if_asked()

from housekeeping import Settings  # noqa: E402
from housekeeping.app import actors, broker  # noqa: E402
from tests.chaos import points  # noqa: E402
from tests.internals.core import logs  # noqa: E402

__all__ = ["actors", "broker"]

settings = Settings.load()
logs.configure(settings.log_level, settings.log_format)
dramatiq.set_broker(broker)
points.install(broker)
# The suite asks for the stacks of all threads when a wait times out, on the stderr that Dramatiq has not replaced.
faulthandler.register(signal.SIGUSR1, file=2)
