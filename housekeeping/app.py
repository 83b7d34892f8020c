"""The ready-made application: ``dramatiq housekeeping.app``, ``periodiq housekeeping.app``.

Importing it reads the settings from the environment, configures logging and sets Dramatiq's
global broker (the two programs take that one). An application with a broker of its own calls
`housekeeping.install` instead.
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


def _compose() -> tuple[Broker, dict[str, Actor[..., Any]]]:
    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    if settings.sentry_dsn is not None:
        error_reporting.report_to_sentry(settings.sentry_dsn)
    broker = message_broker(settings)
    # In Dramatiq's worker processes only: others, a scheduler's too, have no page to be read from.
    if settings.metrics_port is not None and multiprocessing.parent_process() is not None:
        broker.add_middleware(exposition(settings))
    actors = install(broker, settings)
    dramatiq.set_broker(broker)
    return broker, actors


def _run_by_its_program() -> bool:
    """Whether this process is ``dramatiq`` or ``periodiq``, as a command or by ``python -m``."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return name in ("dramatiq", "periodiq")


try:
    broker, actors = _compose()
except HousekeepingError as error:
    # Under their own programs a traceback would bury the one line that helps.
    if not _run_by_its_program():
        raise
    # dramatiq imports this in each of its worker processes; the first one speaks for all.
    if multiprocessing.current_process().name in ("MainProcess", "Process-1"):
        sys.stderr.write(f"housekeeping: {error}\n")
        sys.stderr.flush()
    raise SystemExit(error.exit_code) from None
