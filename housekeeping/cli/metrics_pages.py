"""The pages that Prometheus reads: where the worker's and the scheduler's are, and what they need beforehand."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from housekeeping.core.errors import SettingsError
from housekeeping.core.settings import PREFIX, Settings
from housekeeping.core.telemetry import metrics
from housekeeping.middleware.telemetry.metrics import require_prometheus

#: Where Dramatiq's worker processes share their values; it is read when they start.
_FOLDER: Final = "dramatiq_prom_db"


@contextmanager
def shared_by_processes(settings: Settings) -> Iterator[None]:
    """Within the block a worker that is started has a folder for its metrics, empty at first, and gone afterwards.

    Dramatiq's own default is one folder for all that run on the machine, which nobody empties. A folder
    that the environment names (``dramatiq_prom_db``) is taken as it is.

    Raises:
      SettingsError: When prometheus-client is not installed, or the port is taken.
    """
    if settings.metrics_port is None:
        yield
        return
    require_prometheus()
    with _listening(settings.metrics_host, settings.metrics_port, "METRICS_PORT"):
        pass  # it is free; said here in one line, and not by a process that nobody waits for
    if _FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="housekeeping-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_FOLDER]


def serve_this_process(settings: Settings) -> None:
    """Serve the metrics of this process alone, a scheduler's, in a thread; nothing without a port for it.

    Raises:
      SettingsError: When prometheus-client is not installed, or the port is taken.
    """
    if settings.scheduler_metrics_port is None:
        return
    require_prometheus()
    # It is meant for processes that share one page: the values would turn up on theirs.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    import prometheus_client

    with _listening(settings.metrics_host, settings.scheduler_metrics_port, "SCHEDULER_METRICS_PORT"):
        pass
    prometheus_client.start_http_server(settings.scheduler_metrics_port, settings.metrics_host)
    metrics.export_pending()


def _listening(host: str, port: int, setting: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(f"{PREFIX}{setting} is {port}, where nothing can listen at {host}: {why}") from None
