"""Active alerts grouped by cause, and the form that acknowledges a group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from flask import Flask, abort, redirect, request, url_for
from werkzeug.wrappers import Response

from housekeeping.core.wording import counted
from housekeeping.sweeps.insight.alerts import Alert
from housekeeping.sweeps.ledger.acknowledgments import Acknowledged, AlertKey, acknowledge, acknowledged_by
from housekeeping.sweeps.ledger.action_log import record_action
from housekeeping.web.security import current_user

if TYPE_CHECKING:
    from housekeeping.web.snapshot import SnapshotCache

#: Groups that are shown open: a few alerts fit above the table of workers, a storm does not.
_OPEN_ALERTS: Final = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One alert of a group.

    Attributes:
      worker: The alert's worker; empty for an alert of the whole installation.
    """

    worker: str
    alert: Alert
    acknowledged: Acknowledged | None = None

    @property
    def token(self) -> str:
        """Short text that stands for the worker in a form."""
        return hashlib.sha256(self.worker.encode()).hexdigest()[:6]


@dataclass(slots=True)
class AlertGroup:
    """The active alerts of one name, either the acknowledged or the other ones."""

    name: str
    members: list[Member] = field(default_factory=list)

    @property
    def since(self) -> datetime | None:
        """When the first of them began; None if unknown."""
        return min((each.alert.since for each in self.members if each.alert.since), default=None)

    @property
    def acknowledged(self) -> Acknowledged | None:
        """The latest acknowledgment; None if not acknowledged."""
        return max((each.acknowledged for each in self.members if each.acknowledged), key=_at, default=None)

    @property
    def subject(self) -> str:
        """The worker, or the number of workers or alerts; empty for one alert of the whole installation."""
        if len(self.members) == 1:
            return self.members[0].worker
        return counted(len(self.members), "worker" if all(each.worker for each in self.members) else "alert")

    @property
    def seen(self) -> str:
        """The tokens of the group's members, as its form sends them."""
        return ",".join(each.token for each in self.members)


def group_alerts(
    alerts: Iterable[tuple[str, Alert]], acknowledgments: Mapping[AlertKey, Acknowledged]
) -> list[AlertGroup]:
    """Return the groups: the unacknowledged ones first, and the largest first among both.

    Parameters:
      alerts: Each with its worker's name, empty for the whole installation.
    """
    groups: dict[tuple[str, bool], AlertGroup] = {}
    for worker, alert in alerts:
        known = acknowledged_by(acknowledgments, worker, alert.name, alert.since)
        group = groups.setdefault((alert.name, known is not None), AlertGroup(alert.name))
        group.members.append(Member(worker, alert, known))
    return sorted(groups.values(), key=lambda each: (each.acknowledged is not None, -len(each.members), each.name))


def are_open(groups: Iterable[AlertGroup]) -> bool:
    """Return whether the groups are shown open at first."""
    return sum(len(each.members) for each in groups if each.acknowledged is None) <= _OPEN_ALERTS


def add_acknowledging(app: Flask, snapshots: SnapshotCache) -> None:
    """Register the form."""

    @app.post("/alerts/acknowledge")
    def acknowledge_alerts() -> Response:
        name, seen = request.form.get("name", ""), request.form.get("seen", "").split(",")
        groups = [group for group in snapshots.current().alert_groups if group.name == name]
        # The page sends the workers that it showed, because others may have joined since. Programs name the alert only.
        members = [each for group in groups for each in group.members if seen == [""] or each.token in seen]
        if not members:
            abort(404, "this alert is no longer active; nothing was acknowledged")
        workers = sorted(each.worker for each in members)
        with record_action("acknowledge", name, current_user()) as outcome:
            acknowledge([(worker, name) for worker in workers], current_user())
            outcome.result = f"{name} acknowledged for {', '.join(filter(None, workers)) or 'the installation'}"
        snapshots.invalidate()
        return redirect(url_for("front"), 303)


def _at(acknowledged: Acknowledged) -> datetime:
    return acknowledged.at
