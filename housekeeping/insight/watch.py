"""Background evaluation of the installation, by one worker or scheduler process every half minute.

The process evaluates the alerts, begins to send their events to the webhook, and exports the metrics of the whole
installation: queues, pauses, open runs and full servers. Each process also records once, after it has booted, what has
changed since the previous boot of any process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Iterable, Iterator
from math import nan
from typing import Final

from peewee import PeeweeException

import housekeeping
from housekeeping.brokers import QueueLengths
from housekeeping.core import telemetry
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.logs import error_line, is_secret, to_log_value
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import Settings, variable
from housekeeping.engine.alerts import NO_SPACE
from housekeeping.engine.guard import fingerprint
from housekeeping.insight.status import Snapshot, SnapshotReader, WorkerStatus
from housekeeping.insight.webhook import AlertWebhook
from housekeeping.ledger.alerts import claim_evaluation
from housekeeping.ledger.operators import command_line_user, record_deployment
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.validate_tables import stages_of

logger = named_logger(__name__)

#: Settings that may differ between the processes of one installation.
_OF_PROCESS: Final = frozenset({"log_format", "log_level", "metrics_host", "metrics_port", "scheduler_metrics_port"})
#: Settings whose values are not shown. That one of them has changed is not seen.
_HIDDEN: Final = frozenset(
    {
        "sentry_dsn",
        "ping_url",
        "alert_webhook_url",
        "alert_webhook_secret",
        "erasure_key",
        "web_token",
        "web_read_token",
    }
)
#: Options of a store may be secret whatever their names.
_LEFT_OUT: Final = {"object_stores": {"__all__": {"options"}}}
_STATES: Final = ("waiting", "delayed", "dead")


class InstallationWatch:
    """Evaluation of the installation, by one of its processes at a time."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._recorded = False
        self._reader = SnapshotReader(settings, sweeps, with_progress=False)
        self._last: Snapshot | None = None
        self._webhook = AlertWebhook(settings)

    def look(self) -> None:
        """Read the installation, unless another process has done so within half a minute.

        Raises:
          DatabaseUnavailable: The database ``main`` does not answer. What was exported becomes unknown.
        """
        self._record_deployment()
        try:
            if not claim_evaluation():
                return
        except Exception:
            self._export(None)
            raise
        self._last = self._reader.read(self._last)
        self._export(self._last)
        self._webhook.send_due({alert.alert_id: alert.cause for alert in self._last.alerts})

    def _record_deployment(self) -> None:
        if self._recorded:
            return
        try:
            record_deployment(deployed(self._settings, self._sweeps), command_line_user())
            self._recorded = True
        except (HousekeepingError, PeeweeException) as error:
            # The database does not answer, or the role may not write. Tried again.
            logger.debug("The deployment is not recorded", error=error_line(error))

    def _export(self, found: Snapshot | None) -> None:
        """Export what was read; what could not be read is NaN, as a gauge cannot be taken back."""
        for queue in {sweep.queue for sweep in self._sweeps.values()}:
            lengths = found.queues.get(queue) if found and found.read_at.get("queues") == found.at else None
            for state, number in zip(_STATES, _numbers(lengths), strict=True):
                telemetry.QUEUE_MESSAGES.set(number, queue, state)
            telemetry.QUEUE_OLDEST.set(_oldest_s(lengths, found), queue)
        full = {alert.subject for alert in found.alerts if alert.name == NO_SPACE} if found else set[str]()
        for server in self._reader.servers:
            is_read = server in full or (found is not None and server not in found.unavailable)
            telemetry.SERVER_FULL.set(server in full if is_read else nan, server)
        late = None if found is None else found.late_erasures
        telemetry.LATE_ERASURES.set(nan if late is None else late.number)
        for name, sweep in self._sweeps.items():
            is_read = found is not None and sweep.database in found.clocks
            status = found.statuses.get(name) if found and is_read else None
            telemetry.PAUSED.set(nan if status is None else _is_paused(status), name)
            telemetry.OPEN_RUNS.set(nan if status is None or status.open_runs is None else status.open_runs, name)
        if found is not None:
            telemetry.INSTALLATION_READ.set(time.time())


def deployed(settings: Settings, sweeps: dict[str, Sweep]) -> dict[str, str]:
    """Return what this process consists of, by name: versions, masked settings and digests of declarations."""
    found = {"housekeeping": housekeeping.__version__, **_versions(settings.sweeps)}
    for field, value in settings.model_dump(mode="json", exclude_defaults=True, exclude=_LEFT_OUT).items():
        if field not in _OF_PROCESS:
            hidden = field in _HIDDEN or is_secret(field)
            text = value if isinstance(value, str) else json.dumps(to_log_value(value), sort_keys=True)
            found[variable(field)] = "***" if hidden else to_log_value(text)
    return found | {f"declaration of {name}": _digest(sweep) for name, sweep in sweeps.items()}


def _versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed distributions that have these modules."""
    packages = importlib.metadata.packages_distributions() if modules else {}
    names = {name for module in modules for name in packages.get(module.partition(".")[0], ())}
    return {name: importlib.metadata.version(name) for name in names}


def _digest(sweep: Sweep) -> str:
    try:
        predicate = fingerprint(sweep, stages_of(sweep))
    except Exception:  # a predicate may raise anything, and a run shows it
        predicate = "unknown"
    parts = (predicate, sweep.schedule, sweep.queue, sweep.enabled, str(sweep.limits.runtime))
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:12]


def _numbers(lengths: QueueLengths | None) -> Iterator[float]:
    return (nan if lengths is None else getattr(lengths, state) for state in _STATES)


def _oldest_s(lengths: QueueLengths | None, found: Snapshot | None) -> float:
    if lengths is None or found is None:
        return nan
    if lengths.oldest_at is None:
        # The messages may all be running. RabbitMQ tells no time at all.
        return nan if lengths.waiting else 0.0
    return max(0.0, (found.at - lengths.oldest_at).total_seconds())


def _is_paused(status: WorkerStatus) -> bool:
    return status.switch is not None and status.switch.state == "paused"
