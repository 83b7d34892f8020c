"""Metrics of a worker's processes, served by Dramatiq's own metrics page."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dramatiq import Broker, Middleware, Worker

from housekeeping.core.cron import Cron
from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import Settings
from housekeeping.core.telemetry import metrics
from housekeeping.core.telemetry.logs import configure
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.wording import how_to_install
from housekeeping.middleware.dramatiq_internals import metrics_handler
from housekeeping.middleware.telemetry.health import PageServer, Readiness, with_health
from housekeeping.sweeps.engine import run_metrics
from housekeeping.sweeps.ledger import schema

if TYPE_CHECKING:
    from dramatiq.middleware.prometheus import Prometheus

logger = named_logger(__name__)

_OF_ACTORS: Final = (
    *(metrics.DEDUPLICATED, metrics.RETRIES, metrics.DEAD_LETTERS),
    *(metrics.LEASES_REQUESTED, metrics.LEASES_HELD, metrics.LEASES_LOST),
)


class Metrics(Middleware):
    """Middleware that exports each actor's metrics as 0 before its first message, so that rates see the first increase.

    Note: The export itself is done by Dramatiq's ``Prometheus``, see `exposition`.
    """

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        for name, actor in broker.actors.items():
            for counter in _OF_ACTORS:
                counter.add(name, number=0)
            sweep, cron = actor.options.get("sweep"), actor.options.get("periodic")
            if sweep is not None:
                run_metrics.declare(sweep, cron if isinstance(cron, Cron) else None)


def exposition(settings: Settings) -> Prometheus:
    """Return Dramatiq's middleware for the metrics page, which serves at the address in the settings.

    Raises:
      SettingsError: When prometheus-client is not installed.
    """
    require_prometheus()
    # Imported here, because the import reads its folder from the environment and creates it.
    from dramatiq.middleware.prometheus import Prometheus as DramatiqsOwn

    class Prometheus(DramatiqsOwn):  # its name is looked up to put it first
        @property
        def forks(self) -> list[Callable[[], int]]:
            return [serve]

    return Prometheus()


def require_prometheus() -> None:
    """Raise SettingsError unless prometheus-client is installed; does not import it."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise SettingsError(
            f"a port for metrics is set, but prometheus-client is not installed: {how_to_install('metrics')}"
        )


def serve() -> int:
    """Serve the pages of all processes of a worker, metrics and health, in a process that Dramatiq forks."""
    settings = Settings.load()
    configure(settings.log_level, settings.log_format)
    assert settings.metrics_port is not None
    if settings.database_url is not None:
        schema.use_database(settings)
    address = (settings.metrics_host, settings.metrics_port)
    try:
        server = PageServer(*address, with_health(metrics_handler(), Readiness(settings, "worker")))
    except OSError as error:
        logger.error("Metrics cannot be served", host=address[0], port=address[1], error=str(error))
        return 1
    logger.info("Metrics are served", host=address[0], port=address[1])
    with server:
        server.serve_forever()
    return 0
