"""Background evaluation of the installation, by one of its processes every half minute, and the alert webhook.

The process evaluates the alerts and exports the metrics of the whole installation: queues, pauses, open runs and full
servers. Each process also records once, after its start, what has changed since the last start of any process. The
begin and the end of each alert are sent by POST to the receiver in the settings.

The stored alerts are the queue. Each row says which of its two events the receiver has accepted, so an event outlives
the process that has raised it. A sender claims an event by a statement that also schedules its next attempt. Of two
senders, one gets it. If the sender is killed, the event is sent again with the same id.

The request follows Standard Webhooks (https://www.standardwebhooks.com), for which receivers have
libraries. URL and secret are in no log line and no error.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.metadata
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import nan
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from peewee import PeeweeException

import housekeeping
from housekeeping.brokers import QueueLengths
from housekeeping.core import telemetry
from housekeeping.core.errors import HousekeepingError
from housekeeping.core.logs import error_line, is_secret, mask_secrets, to_log_value
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.pings import request
from housekeeping.core.settings import SECRET_PREFIX, Settings, variable
from housekeeping.database.connection import close_databases
from housekeeping.engine.alerts import NO_SPACE
from housekeeping.engine.guard import fingerprint
from housekeeping.insight.status import Snapshot, SnapshotReader
from housekeeping.insight.wording import as_json
from housekeeping.ledger.alerts import AlertEvent, AlertKey, claim_evaluation, claim_event, mark_delivered
from housekeeping.ledger.operators import command_line_user, record_deployment
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.validate_tables import stages_of

logger = named_logger(__name__)

#: Settings that may differ between the processes of one installation.
_OF_PROCESS: Final = frozenset({"log_format", "log_level", "metrics_host", "metrics_port", "scheduler_metrics_port"})
#: Options of a store may be secret, whatever their names are.
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
          DatabaseUnavailable: The database ``main`` does not answer. The exported metrics become NaN.
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
        """Export the metrics. Values that could not be read are NaN, because a gauge cannot be removed."""
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
            paused = status is not None and status.switch is not None and status.switch.state == "paused"
            telemetry.PAUSED.set(nan if status is None else paused, name)
            telemetry.OPEN_RUNS.set(nan if status is None or status.open_runs is None else status.open_runs, name)
        if found is not None:
            telemetry.INSTALLATION_READ.set(time.time())


def deployed(settings: Settings, sweeps: dict[str, Sweep]) -> dict[str, str]:
    """Return the configuration of this process by name: versions, masked settings and digests of declarations."""
    found = {"housekeeping": housekeeping.__version__, **_versions(settings.sweeps)}
    for field, value in settings.model_dump(mode="json", exclude_defaults=True, exclude=_LEFT_OUT).items():
        if field not in _OF_PROCESS:
            hidden = field == "sentry_dsn" or is_secret(field)
            text = value if isinstance(value, str) else json.dumps(to_log_value(value), sort_keys=True)
            found[variable(field)] = "***" if hidden else to_log_value(text)
    return found | {f"declaration of {name}": _digest(sweep) for name, sweep in sweeps.items()}


def _versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed distributions that provide these modules."""
    packages = importlib.metadata.packages_distributions() if modules else {}
    names = {name for module in modules for name in packages.get(module.partition(".")[0], ())}
    return {name: importlib.metadata.version(name) for name in names}


def _digest(sweep: Sweep) -> str:
    try:
        predicate = fingerprint(sweep, stages_of(sweep))
    except Exception:  # a predicate may raise anything; its run reports the error
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


#: Statuses below 500 of a receiver that accepts no event now: timeout, too early, too many requests.
_BUSY: Final = (408, 425, 429)
#: Seconds before each further attempt to store that an event was accepted. A restart of PostgreSQL takes seconds.
_STORED_AGAIN_S: Final = (1, 2, 4, 8)


class AlertWebhook:
    """Sender of the events of alerts, one at a time, in a background thread."""

    def __init__(self, settings: Settings) -> None:
        url, secret = settings.alert_webhook_url, settings.alert_webhook_secret
        self._url = None if url is None else url.get_secret_value()
        self._key = b"" if secret is None else base64.b64decode(secret.get_secret_value().removeprefix(SECRET_PREFIX))
        self._installation = settings.namespace
        self._causes: Mapping[int | None, AlertKey | None] = {}
        self._sender: threading.Thread | None = None
        self._failing = False

    def send_due(self, causes: Mapping[int | None, AlertKey | None]) -> None:
        """Start to send the due events in the background, unless a thread is already sending.

        Parameters:
          causes: The causes of the active alerts, by `Alert.alert_id`.
        """
        self._causes = causes
        if self._url is None or (self._sender is not None and self._sender.is_alive()):
            return
        self._sender = threading.Thread(target=self._send_due, name="webhook", daemon=True)
        self._sender.start()

    def wait(self, most_s: float) -> None:
        """Wait until the due events are sent, for at most this many seconds."""
        if self._sender is not None:
            self._sender.join(most_s)

    def _send_due(self) -> None:
        """Send the due events until none is left, or the receiver accepts no more."""
        try:
            while (event := claim_event()) is not None and self._send(event):
                ...
        except (HousekeepingError, PeeweeException) as error:
            self._note(f"the alerts cannot be read: {error_line(error)}")
        finally:
            close_databases()

    def _send(self, event: AlertEvent) -> bool:
        """Send an event. Return whether to send the next one."""
        assert self._url is not None
        event_id, body = self._message(event)
        answer = request(self._url, body, signed(self._key, event_id, int(time.time()), body))
        if not isinstance(answer, int):
            self._note(answer)
            return False
        if answer < 300:
            _store(event)
            self._failing = False
            return True
        self._note(f"status {answer}")
        # It rejects this event, and may accept the next one.
        return 400 <= answer < 500 and answer not in _BUSY

    def _note(self, reason: str) -> None:
        """Log why an event could not be sent, once until one is accepted."""
        if not self._failing:
            logger.warning("Webhook could not be sent", reason=reason)
        self._failing = True

    def _message(self, event: AlertEvent) -> tuple[str, bytes]:
        """Return the id of an event, which is the same for each attempt, and the body of its request."""
        alert = replace(event.alert, text=mask_secrets(event.alert.text), cause=self._causes.get(event.alert.alert_id))
        # Row ids start at 1 again in a new database.
        parts = (self._installation, alert.alert_id, event.alert.since, event.name)
        event_id = str(uuid5(NAMESPACE_URL, json.dumps(parts, default=str)))
        values: dict[str, Any] = {
            "id": event_id,
            "type": f"alert.{event.name}",
            "at": event.at,
            "installation": self._installation,
            "alert": alert,
        }
        return event_id, json.dumps(as_json(values)).encode()


def signed(key: bytes, event_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a request, with its signature."""
    signature = hmac.digest(key, f"{event_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return {
        "Content-Type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }


def _store(event: AlertEvent) -> None:
    """Store that the receiver has accepted an event. If this fails, the event is sent once more."""
    for wait_s in _STORED_AGAIN_S:
        try:
            mark_delivered(event)
            return
        except (HousekeepingError, PeeweeException):
            time.sleep(wait_s)
    mark_delivered(event)
