"""Metrics pages of the worker and scheduler processes for Prometheus."""

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

#: Environment variable with the folder in which Dramatiq's worker processes share their metrics.
_FOLDER: Final = "dramatiq_prom_db"


@contextmanager
def shared_by_processes(settings: Settings) -> Iterator[None]:
    """Provide an empty metrics folder for the worker processes, and remove it afterward.

    Dramatiq's default is one folder for all workers of the machine, which is never emptied. A folder that the
    environment variable ``dramatiq_prom_db`` names is used instead.

    Raises:
      SettingsError: prometheus-client is not installed, or the port is in use.
    """
    if settings.metrics_port is None:
        yield
        return
    require_prometheus()
    with _listening(settings.metrics_host, settings.metrics_port, "METRICS_PORT"):
        pass  # the port is free; checked here because a child process would fail unnoticed
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
    """Serve the metrics of this scheduler process in a thread, if the settings have a port for it.

    Raises:
      SettingsError: prometheus-client is not installed, or the port is in use.
    """
    if settings.scheduler_metrics_port is None:
        return
    require_prometheus()
    # With this variable, the values would appear on the page of the worker processes.
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
        reason = error.strerror or str(error)
        raise SettingsError(f"{PREFIX}{setting} is {port}, which cannot be opened on {host}: {reason}") from None
