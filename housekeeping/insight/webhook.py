"""Webhook: the beginning and the end of each alert, sent by POST to the receiver in the settings.

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
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from peewee import PeeweeException

from housekeeping.core.errors import HousekeepingError
from housekeeping.core.logs import error_line, mask_secrets
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.pings import request
from housekeeping.core.settings import SECRET_PREFIX, Settings
from housekeeping.database.connection import close_databases
from housekeeping.insight.wording import as_json
from housekeeping.ledger.alerts import AlertEvent, AlertKey, claim_event, mark_delivered

logger = named_logger(__name__)

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
