"""The ready-made application: ``dramatiq housekeeping.app``, ``periodiq housekeeping.app``.

Importing it reads the settings from the environment, configures logging and sets Dramatiq's
global broker (the two programs take that one). An application with a broker of its own calls
`housekeeping.install` instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import dramatiq
from dramatiq import Actor
from dramatiq.brokers.redis import MAINTENANCE_SCALE, RedisBroker

from housekeeping.foundation import logs, reports
from housekeeping.foundation.errors import HousekeepingError
from housekeeping.foundation.redis_client import redis_client
from housekeeping.foundation.settings import Settings
from housekeeping.installation import install

HEARTBEAT_TIMEOUT_MS: Final = 60_000  # semantics.md, B1: a killed worker's messages run again after this
DEAD_MESSAGE_TTL_MS: Final = 7 * 24 * 3600 * 1000  # Dramatiq's own, said aloud: dead letters are kept for a week


def redis_broker(settings: Settings) -> RedisBroker:
    """A Redis broker with nothing left to chance; it has no middleware yet."""
    return RedisBroker(
        client=redis_client(settings.broker_url or settings.require_redis_url()),
        namespace=f"{settings.namespace}:broker",
        middleware=[],
        # Each command looks for messages of dead workers; by default 1 in 1000 does, which takes 10 minutes.
        maintenance_chance=MAINTENANCE_SCALE,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_MS,
        dead_message_ttl=DEAD_MESSAGE_TTL_MS,
    )


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
