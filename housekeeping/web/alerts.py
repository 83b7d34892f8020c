"""Active alerts on the pages, grouped by name, and the form that acknowledges them.

docs/howto/alerts.md has the long form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from flask import Flask, abort, redirect, request, url_for
from werkzeug.wrappers import Response

from housekeeping.core.logs import counted
from housekeeping.ledger.alerts import Acknowledged, Alert, AlertKey, acknowledge, describe_acknowledged
from housekeeping.ledger.operators import record_action
from housekeeping.web.security import current_user
from housekeeping.web.snapshot import SnapshotCache

#: Groups that are shown open: a few alerts fit above the table of workers, a storm does not.
_OPEN_ALERTS: Final = 3


@dataclass(slots=True)
class AlertGroup:
    """The active root causes of one name, either the acknowledged or the other ones.

    Attributes:
      explained: The alerts that they explain, by name.
    """

    name: str
    members: list[Alert] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)

    @property
    def caused(self) -> str:
        """The alerts that they explain: ``overdue (61), backlog (3)``; empty without any."""
        return ", ".join(f"{name} ({number:,})" for name, number in self.explained.most_common())

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
    """Return the root causes by name, in the order of the alerts; the acknowledged ones in groups of their own.

    Parameters:
      alerts: As `housekeeping.insight.alerts.explained` returns them.
    """
    groups: dict[tuple[str, bool], AlertGroup] = {}
    of_root: dict[AlertKey, AlertGroup] = {}
    for alert in alerts:
        if alert.cause is not None:
            of_root[alert.cause].explained[alert.name] += 1
            continue
        key = alert.name, alert.acknowledged is not None
        of_root[alert.key] = groups.setdefault(key, AlertGroup(alert.name))
        of_root[alert.key].members.append(alert)
    return list(groups.values())


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
