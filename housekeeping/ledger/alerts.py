"""Alerts in the ledger of the database ``main``: begin, acknowledgment, end, and delivery to the webhook.

`reconcile` compares the alerts that a reader has evaluated with the stored ones. The dashboard, commands and one
process of the installation do that at the same time. Each beginning and each end is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from peewee import PeeweeException

from housekeeping.core.logs import error_line, in_one_line, printable
from housekeeping.core.logs import logger as named_logger
from housekeeping.core.settings import MAIN
from housekeeping.database.connection import database, translate_postgres_errors
from housekeeping.ledger.schema import NOW, AlertRow, Evaluation

logger = named_logger(__name__)

Severity = Literal["critical", "warning"]
#: Worker, name and subject of an alert. Of several active alerts no two have the same key.
AlertKey = tuple[str, str, str]

#: Alerts of work that has stopped or fails repeatedly. The others can wait until the morning.
CRITICAL: Final = frozenset(
    {"failed_runs", "no_scheduler", "no_space", "no_worker", "overdue", "saturated", "stuck", "unavailable"}
)
#: Interval at which the text of an active alert is stored again, and between two evaluations in the background.
INTERVAL: Final = timedelta(seconds=30)
_MAX_USER: Final = 200  # characters


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Who acknowledged an alert, and when."""

    user: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Alert:
    """An active alert.

    Attributes:
      name: A key of `housekeeping.insight.alerts.ALERTS`; ``most_…`` with a count's name.
      text: A description for operators.
      limit: The threshold; None where it is not a number.
      value: The number that exceeds it; None where it is not a number.
      since: When it began; None if unknown.
      worker: Empty for an alert of the whole installation.
      subject: What else distinguishes alerts of the same name: the queue or the server; usually empty.
      renewed_at: Time of the latest event; an acknowledgment before it does not count. None: it holds until the end.
      cause: Key of the alert that explains this one; None for a root cause.
      acknowledged: None if it is not acknowledged.
      alert_id: Its row; None if it is not stored.
      run: Label of the run that it is about; None without one, or if only the stored alert is known.
      never_seen: Whether the installation has not had a process of the missing kind yet.
    """

    name: str
    text: str
    limit: float | None = None
    value: float | None = None
    since: datetime | None = None
    worker: str = ""
    subject: str = ""
    renewed_at: datetime | None = None
    cause: AlertKey | None = None
    acknowledged: Acknowledged | None = None
    alert_id: int | None = None
    run: str | None = None
    never_seen: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def key(self) -> AlertKey:
        """Worker, name and subject."""
        return self.worker, self.name, self.subject

    @property
    def severity(self) -> Severity:
        """``critical`` if work has stopped or fails repeatedly, else ``warning``."""
        return "critical" if self.name in CRITICAL else "warning"

    def as_json(self) -> dict[str, Any]:
        """Return one element of ``alerts`` in ``housekeeping status --json``."""
        shown = ("name", "worker", "subject", "severity", "text", "limit", "value", "since", "acknowledged")
        cause = None if self.cause is None else dict(zip(("worker", "name", "subject"), self.cause, strict=True))
        return {**{name: getattr(self, name) for name in shown}, "cause": cause}


def reconcile(
    found: Iterable[Alert], is_judged: Callable[[Alert], bool], at: datetime, *, stores: bool = True
) -> tuple[list[Alert], PeeweeException | None]:
    """Store which alerts have begun and ended, in one statement; without a change, only read.

    Return the evaluated alerts with their beginnings and acknowledgments, then the stored ones that were not judged;
    and why the changes could not be stored. A reader that may not write still gets the stored ones.

    Parameters:
      found: The evaluated alerts.
      is_judged: Returns whether a stored alert would have been found if it were active. The others stay active.
      at: The database's time before the evaluation. What a later evaluation has seen or ended stays as it is.
      stores: False only reads.

    Raises:
      peewee.PeeweeException: The alerts cannot be read.
    """
    stored = {alert.key: (alert, seen_at) for alert, seen_at in _active()}
    evaluated = {alert.key: alert for alert in found}
    new = [alert for key, alert in evaluated.items() if key not in stored]
    seen = [
        replace(evaluated[key], alert_id=alert.alert_id)
        for key, (alert, seen_at) in stored.items()
        if key in evaluated and seen_at < at - INTERVAL
    ]
    gone = [
        alert
        for key, (alert, _) in stored.items()
        if (_is_renewed(alert, evaluated[key]) if key in evaluated else is_judged(alert))
    ]
    began, ended, error = dict[AlertKey, Alert](), set[int](), None
    if stores and (new or seen or gone):
        try:
            began, ended = _store(new, seen, gone, at)
        except PeeweeException as failure:
            # A role or a server that may only read, a full disk, or a locked table. The next evaluation stores them.
            logger.debug("Alerts are not stored", error=error_line(failure))
            error = failure
    known = {key: alert for key, (alert, _) in stored.items() if alert.alert_id not in ended} | began
    return merged(evaluated.values(), known, is_judged), error


def merged(found: Iterable[Alert], known: Mapping[AlertKey, Alert], is_judged: Callable[[Alert], bool]) -> list[Alert]:
    """Return the evaluated alerts with what is known of them, then the known ones that were not judged."""
    evaluated = {alert.key: alert for alert in found}
    current = [_recorded(alert, known.get(key)) for key, alert in evaluated.items()]
    return [*current, *(alert for key, alert in known.items() if key not in evaluated and not is_judged(alert))]


def _is_renewed(stored: Alert, found: Alert) -> bool:
    """Return whether something has happened since the acknowledgment. Then the alert ends, and begins again."""
    known = stored.acknowledged
    return known is not None and found.renewed_at is not None and found.renewed_at > known.at


def _recorded(alert: Alert, stored: Alert | None) -> Alert:
    if stored is None:
        return alert
    return replace(alert, since=stored.since or alert.since, acknowledged=stored.acknowledged, alert_id=stored.alert_id)


def _active() -> list[tuple[Alert, datetime]]:
    rows: Any = AlertRow.select().where(AlertRow.ended_at.is_null()).order_by(AlertRow.id)
    return [(_alert_of(row), row.seen_at) for row in rows]


def _alert_of(row: Any) -> Alert:
    by, at = row.acknowledged_by, row.acknowledged_at
    return Alert(
        row.name,
        row.text,
        row.limit,
        row.value,
        row.began_at,
        row.worker,
        row.subject,
        acknowledged=None if at is None else Acknowledged(by, at),
        alert_id=row.id,
    )


#: Parameters: ids that are gone, time of the evaluation, alerts that are still active, that time again; new alerts and
#: twice that time. Rows that another reader changes at the moment are left to the next evaluation.
_RECONCILE: Final = """
WITH ended AS (
    UPDATE {alerts} SET ended_at = clock_timestamp() WHERE id IN (
        SELECT id FROM {alerts} WHERE id = ANY(%s) AND ended_at IS NULL AND seen_at <= %s FOR UPDATE SKIP LOCKED
    )
    RETURNING id
), seen AS (
    UPDATE {alerts} AS stored
    SET seen_at = locked.at, text = locked.text, "limit" = locked."limit", value = locked.value
    FROM (
        SELECT id, given.at, given.text, given."limit", given.value FROM {alerts} AS kept JOIN (
            SELECT *, %s::timestamptz AS at FROM jsonb_to_recordset(%s::jsonb)
            AS alert (id bigint, text text, "limit" double precision, value double precision)
        ) AS given USING (id)
        WHERE ended_at IS NULL AND seen_at < at FOR UPDATE OF kept SKIP LOCKED
    ) AS locked
    WHERE stored.id = locked.id
), began AS (
    INSERT INTO {alerts} (worker, name, subject, severity, text, "limit", value, began_at, seen_at)
    SELECT worker, name, subject, severity, text, "limit", value, least(since, at), at FROM (
        SELECT *, %s::timestamptz AS at FROM jsonb_to_recordset(%s::jsonb) AS alert (
            worker text, name text, subject text, severity text, text text,
            "limit" double precision, value double precision, since timestamptz
        )
    ) AS given
    WHERE NOT EXISTS (
        SELECT FROM {alerts} AS later
        WHERE (later.worker, later.name, later.subject) = (given.worker, given.name, given.subject)
        AND later.ended_at > given.at
    )
    ORDER BY worker, name, subject
    ON CONFLICT (worker, name, subject) WHERE ended_at IS NULL DO NOTHING
    RETURNING id, worker, name, subject, began_at
)
SELECT id, NULL, NULL, NULL, NULL FROM ended UNION ALL SELECT id, worker, name, subject, began_at FROM began
"""


def _store(
    new: Sequence[Alert], seen: Sequence[Alert], gone: Sequence[Alert], at: datetime
) -> tuple[dict[AlertKey, Alert], set[int]]:
    """Store the changes; return the alerts that have begun, and the ids of those that have ended."""
    ids = [alert.alert_id for alert in gone]
    table = f'"{AlertRow._meta.schema}".alerts'
    values = [ids, at, at, _as_rows(seen), at, _as_rows(new)]
    with database.atomic():
        rows = database.execute_sql(_RECONCILE.format(alerts=table), values).fetchall()
    unstored = {alert.key: alert for alert in new}
    began = {
        (worker, name, subject): replace(unstored[worker, name, subject], since=began_at, alert_id=alert_id)
        for alert_id, worker, name, subject, began_at in rows
        if name is not None
    }
    return began, {alert_id for alert_id, _, name, _, _ in rows if name is None}


def _as_rows(alerts: Sequence[Alert]) -> str:
    return json.dumps(
        [
            {
                "id": alert.alert_id,
                **{name: getattr(alert, name) for name in ("worker", "name", "subject", "severity", "limit", "value")},
                "text": printable(alert.text),
                "since": None if alert.since is None else alert.since.isoformat(),
            }
            for alert in alerts
        ]
    )


@dataclass(frozen=True, slots=True)
class AlertEvent:
    """Beginning or end of a stored alert, which a sender has claimed."""

    name: Literal["begin", "end"]
    alert: Alert
    at: datetime


#: Interval after the first attempt to send an event. Each further one is twice as long, up to the longest.
_FIRST_RETRY: Final = timedelta(seconds=30)
_LONGEST_RETRY: Final = timedelta(minutes=15)
#: How long the events of an alert are sent after it was last evaluated, or has ended.
_DELIVERED_FOR: Final = timedelta(days=1)

#: Parameters: `_FIRST_RETRY`, `_LONGEST_RETRY`, `_DELIVERED_FOR`, `_LONGEST_RETRY`. A stored time further in the future
#: than that is from before the clock was set back.
_CLAIM_EVENT: Final = """
UPDATE {alerts} SET attempts = attempts + 1,
    due_at = clock_timestamp() + least(%s * power(2, least(attempts, 16)), %s)
WHERE id = (
    SELECT id FROM {alerts}
    WHERE (delivered IS NULL OR (delivered = 'begin' AND ended_at IS NOT NULL))
    AND greatest(seen_at, ended_at) > clock_timestamp() - %s
    AND due_at NOT BETWEEN clock_timestamp() AND clock_timestamp() + %s
    ORDER BY due_at, id LIMIT 1 FOR UPDATE SKIP LOCKED
)
RETURNING *
"""


def claim_event() -> AlertEvent | None:
    """Return the next event to deliver and schedule its next attempt, in one statement; None if none is due.

    So two senders never have the same event, and one whose sender was killed is sent again.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer.
    """
    table = f'"{AlertRow._meta.schema}".alerts'
    values = (_FIRST_RETRY, _LONGEST_RETRY, _DELIVERED_FOR, _LONGEST_RETRY)
    with database.using(MAIN), translate_postgres_errors():
        for row in AlertRow.raw(_CLAIM_EVENT.format(alerts=table), *values):
            if row.delivered is None:
                return AlertEvent("begin", _alert_of(row), row.began_at)
            return AlertEvent("end", _alert_of(row), row.ended_at)
    return None


def count_refused_events() -> int:
    """Return how many events were sent at least twice, and are not accepted yet."""
    is_next = AlertRow.delivered.is_null() | ((AlertRow.delivered == "begin") & AlertRow.ended_at.is_null(False))
    with database.using(MAIN), translate_postgres_errors():
        number: int = AlertRow.select().where(is_next & (AlertRow.attempts > 1)).count()
    return number


def mark_delivered(event: AlertEvent) -> None:
    """Store that the receiver has accepted an event. The end of an alert is due at once.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer.
    """
    before = AlertRow.delivered.is_null() if event.name == "begin" else AlertRow.delivered == "begin"
    values = {"delivered": event.name, "attempts": 0, "due_at": NOW}
    with database.using(MAIN), translate_postgres_errors():
        AlertRow.update(**values).where((AlertRow.id == event.alert.alert_id) & before).execute()


def acknowledge(alerts: Iterable[Alert], user: str) -> list[Alert]:
    """Acknowledge stored alerts until they end; return those that are still active.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer; nothing was changed.
    """
    by_id = {alert.alert_id: alert for alert in alerts if alert.alert_id is not None}
    values = {"acknowledged_at": NOW, "acknowledged_by": in_one_line(user, _MAX_USER)}
    is_active = AlertRow.id.in_(list(by_id)) & AlertRow.ended_at.is_null()
    with database.using(MAIN), translate_postgres_errors(), database.atomic():
        changed = AlertRow.update(**values).where(is_active).returning(AlertRow.id).tuples().execute()
        found = {alert_id for (alert_id,) in changed}
    return [alert for alert_id, alert in by_id.items() if alert_id in found]


def describe_acknowledged(name: str, alerts: Sequence[Alert]) -> str:
    """Return what was acknowledged: the workers, ``the installation``, or nothing."""
    workers = sorted({alert.worker for alert in alerts})
    shown = ", ".join(worker or "the installation" for worker in workers)
    return f"{name} acknowledged for {shown}" if workers else f"{name} has ended; nothing was acknowledged"


#: A stored time in the future is from before the clock was set back.
_CLAIM: Final = """
INSERT INTO {evaluations} AS last (began_at) VALUES (clock_timestamp())
ON CONFLICT (single) DO UPDATE SET began_at = excluded.began_at
WHERE last.began_at NOT BETWEEN excluded.began_at - %s AND excluded.began_at
RETURNING began_at
"""


def last_evaluation() -> datetime | None:
    """Return when a process of the installation last began to evaluate the alerts; None if none has."""
    began_at: datetime | None = Evaluation.select(Evaluation.began_at).scalar()
    return began_at


def claim_evaluation() -> bool:
    """Return whether this process is to evaluate the alerts now: True for one process of the installation every 30 s.

    Raises:
      DatabaseUnavailable: The database ``main`` does not answer.
    """
    table = f'"{Evaluation._meta.schema}".evaluations'
    with database.using(MAIN), translate_postgres_errors(), database.atomic():
        return database.execute_sql(_CLAIM.format(evaluations=table), [INTERVAL]).fetchone() is not None
