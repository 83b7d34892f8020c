"""Ready-made application for ``dramatiq housekeeping.app`` and ``periodiq housekeeping.app``.

Importing this module reads the settings from the environment, configures logging and sets Dramatiq's global broker,
which the two programs use. An application with a broker of its own calls `housekeeping.install` instead.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq import Actor, Broker

from housekeeping.brokers import message_broker
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry import error_reporting, logs
from housekeeping.installation import install
from housekeeping.middleware.telemetry.metrics import exposition


def _create() -> tuple[Broker, dict[str, Actor[..., Any]]]:
    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    if settings.sentry_dsn is not None:
        error_reporting.report_to_sentry(settings.sentry_dsn)
    broker = message_broker(settings)
    # Only in Dramatiq's worker processes. Other processes, such as a scheduler, serve no metrics.
    if settings.metrics_port is not None and multiprocessing.parent_process() is not None:
        broker.add_middleware(exposition(settings))
    actors = install(broker, settings)
    dramatiq.set_broker(broker)
    return broker, actors


def _started_by_dramatiq() -> bool:
    """Return whether this process is ``dramatiq`` or ``periodiq``, as a command or by ``python -m``."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return name in ("dramatiq", "periodiq")


try:
    broker, actors = _create()
except HousekeepingError as error:
    # In dramatiq and periodiq a traceback would hide the one line that helps.
    if not _started_by_dramatiq():
        raise
    # Every worker process of dramatiq imports this module; only the first one reports.
    if multiprocessing.current_process().name in ("MainProcess", "Process-1"):
        sys.stderr.write(f"housekeeping: {error}\n")
        sys.stderr.flush()
    raise SystemExit(error.exit_code) from None
