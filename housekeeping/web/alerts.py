"""Active alerts on the pages: grouped by name, each with its meaning and remedy, and the form that acknowledges them.

docs/howto/alerts.md has the long form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from flask import Flask, abort, redirect, request, url_for
from werkzeug.wrappers import Response

from housekeeping.core.logs import counted
from housekeeping.ledger.alerts import Acknowledged, Alert, acknowledge, describe_acknowledged
from housekeeping.ledger.operators import record_action
from housekeeping.web.security import current_user
from housekeeping.web.snapshot import SnapshotCache

#: Groups that are shown open: a few alerts fit above the table of workers, a storm does not.
_OPEN_ALERTS: Final = 3


@dataclass(slots=True)
class AlertGroup:
    """The active alerts of one name, either the acknowledged or the other ones."""

    name: str
    members: list[Alert] = field(default_factory=list)

    @property
    def since(self) -> datetime | None:
        """When the first of them began; None if unknown."""
        return min((each.since for each in self.members if each.since), default=None)

    @property
    def acknowledged(self) -> Acknowledged | None:
        """The latest acknowledgment; None if not acknowledged."""
        known = [each.acknowledged for each in self.members if each.acknowledged]
        return max(known, key=lambda each: each.at, default=None)

    @property
    def subject(self) -> str:
        """The worker of a single alert, empty if it concerns the whole installation; of several alerts their number."""
        if len(self.members) == 1:
            return self.members[0].worker
        return counted(len(self.members), "worker" if all(each.worker for each in self.members) else "alert")

    @property
    def seen(self) -> str:
        """The ids of the group's alerts, as its form sends them."""
        return ",".join(str(each.alert_id) for each in self.members)


def group_alerts(alerts: Iterable[Alert]) -> list[AlertGroup]:
    """Return the groups: the unacknowledged ones first, and the largest first among both."""
    groups: dict[tuple[str, bool], AlertGroup] = {}
    for alert in alerts:
        key = alert.name, alert.acknowledged is not None
        groups.setdefault(key, AlertGroup(alert.name)).members.append(alert)
    return sorted(groups.values(), key=lambda each: (each.acknowledged is not None, -len(each.members), each.name))


def are_open(groups: Iterable[AlertGroup]) -> bool:
    """Return whether the groups are shown open at first."""
    return sum(len(each.members) for each in groups if each.acknowledged is None) <= _OPEN_ALERTS


def add_acknowledging(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the form."""

    @app.post("/alerts/acknowledge")
    def acknowledge_alerts() -> Response:
        name, seen = request.form.get("name", ""), request.form.get("seen", "").split(",")
        active = [alert for alert in snapshots.current().alerts if alert.name == name]
        # The page sends the alerts that it showed, because others may have begun since. Programs name the alert only.
        chosen = [alert for alert in active if seen == [""] or str(alert.alert_id) in seen]
        if not chosen:
            abort(404, "this alert is no longer active; nothing was acknowledged")
        with record_action("acknowledge", name, current_user()) as outcome:
            outcome.result = describe_acknowledged(name, acknowledge(chosen, current_user()))
        snapshots.invalidate()
        return redirect(url_for("front"), 303)


@dataclass(frozen=True, slots=True)
class Help:
    """Meaning of an alert and what an operator does about it."""

    means: str
    do: str


#: Alert name -> help. ``most_…`` stands for all alerts on a count.
ALERTS: Final = {
    "longest_run": Help(
        "A run exceeded the duration that its document allows.",
        "Compare the counts of the last runs: more rows, or slower? If the database is overloaded, narrow the worker. "
        "housekeeping doctor names missing indexes.",
    ),
    "backlog": Help(
        "The backlog exceeds what its document allows.",
        "Compare arrived and processed rows on the worker's page. If runs are missing, see housekeeping why; "
        "if they are not and the backlog grows, raise batch_size or max_runtime_s.",
    ),
    "failed_rows": Help(
        "Some records could not be processed; all others were.",
        "The worker's page shows the rejected rows with time and cause; the log has the first 20 of each cause. "
        "The next run retries them.",
    ),
    "clock": Help(
        "The clock of the last run's machine is over 5 s from the database's or, for uploads, from that of Redis. Over "
        "a minute, no run starts there.",
        "Check NTP on that machine and on the server's (chronyc tracking, timedatectl). The database's clock decides "
        "which rows are stale; the scheduler's clock decides when schedules fire.",
    ),
    "most_…": Help(
        "One run had an unusually high count.",
        "Check the source of these rows, such as CI runners. Pause the worker while you do.",
    ),
    "failed_runs": Help(
        "Several runs in a row failed. Of a worker with an argument: several with the same one, which the text names.",
        "Read the last run's error, then: housekeeping doctor. Nothing is lost: failed batches were rolled back. A "
        "failing argument is tried again after 1 minute at first, after an hour at most.",
    ),
    "last_run": Help(
        "The last run failed or was lost.",
        "The text is the reason. The retry and the next tick follow automatically. If they fail too, fix the reason.",
    ),
    "overdue": Help(
        "The worker has not run for several periods of its schedule.",
        "Check that housekeeping scheduler and housekeeping worker are running, then: housekeeping why NAME.",
    ),
    "stuck": Help(
        "A run is open for over a minute longer than its maximum runtime, or has sent no heartbeat for two minutes and "
        "no other run has taken over. It may wait for a server that never answers, and it occupies a thread.",
        "Look at the run: housekeeping runs ID. Then restart the process that the text names; another run takes over "
        "and resumes. Give the function of a Call a time limit of its own.",
    ),
    "breaker": Help(
        "Far more rows are stale than usual. By default the run continues; a breaker can be set to limit or stop it.",
        "Look at the plan. If these rows should stay, pause the worker. If they should go and the breaker limits or "
        "stops the runs: housekeeping run NAME --confirm.",
    ),
    "unconfirmed": Help(
        "No run of the worker has completed yet, or its predicate has changed since, and a run would process over 20 % "
        "of a table and at least 1,000 rows.",
        "Look at the plan. If the rows should go: housekeeping run NAME --confirm; scheduled runs "
        "follow. If not, correct the declaration of the sweep.",
    ),
    "throttled": Help(
        "The last three runs were throttled because of the database's health or by a function of your own, and ended "
        "early.",
        "The text names the cause, such as replication lag. Repair it, or remove an unused standby. Or change the "
        "limit under gates in HOUSEKEEPING_WORKERS.",
    ),
    "no_worker": Help(
        "No living worker process serves a queue that has scheduled workers or waiting messages.",
        "Start housekeeping worker, or find out why it ended: its last log lines, the kernel log (out of memory). "
        "Nothing is lost: messages wait, and those of a killed worker run again.",
    ),
    "no_scheduler": Help(
        "No scheduler has been alive for two periods of the shortest schedule, and for at least two minutes.",
        "Start housekeeping scheduler, or find out why it ended. It sends the latest missed tick.",
    ),
    "unseen": Help(
        "The backlog cannot be counted: a table or store is unavailable or unreadable, or a predicate fails.",
        "The text names the cause; housekeeping doctor shows what is missing.",
    ),
}
_OTHER: Final = Help("This alert has no help text.", "The text says what happened; housekeeping doctor may know more.")


def topic(name: str) -> str:
    """Return the key in `ALERTS` for an alert's name."""
    return "most_…" if name.startswith("most_") else name


def help_for(name: str) -> Help:
    """Return the help of an alert, or a general one for an unknown alert."""
    return ALERTS.get(topic(name), _OTHER)
