"""The ready-made application: ``dramatiq housekeeping.app``, ``periodiq housekeeping.app``.

Importing it reads the settings from the environment, configures logging and sets Dramatiq's
global broker (the two programs take that one). An application with a broker of its own calls
`housekeeping.install` instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers import redis_broker
from housekeeping.foundation import logs, reports
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.foundation.settings import Settings
from housekeeping.installation import install


def _compose() -> tuple[RedisBroker, dict[str, Actor[..., Any]]]:
    settings = Settings.load()
    logs.configure(settings.log_level, settings.log_format)
    if settings.sentry_dsn is not None:
        reports.report_to_sentry(settings.sentry_dsn)
    broker = redis_broker(settings)
    actors = install(broker, settings)
    dramatiq.set_broker(broker)
    return broker, actors


try:
    broker, actors = _compose()
except HousekeepingError as error:
    # Under their own programs a traceback would bury the one line that helps.
    if Path(sys.argv[0]).name not in ("dramatiq", "periodiq", "__main__.py"):
        raise
    sys.stderr.write(f"housekeeping: {error}\n")
    raise SystemExit(error.exit_code) from None
