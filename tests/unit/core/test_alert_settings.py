from __future__ import annotations

from datetime import timedelta

import pytest

from housekeeping import Alerts
from tests.internals.core import SettingsError, WorkerSettings
from tests.internals.workers import drop_canceling
from tests.internals.workers import status_sweep as sweep


def configured(**alarms: float | None) -> Alerts:
    return drop_canceling.configured(WorkerSettings(alarms=alarms)).alerts


def test_every_limit_can_be_set_and_the_others_keep_their_documents_value() -> None:
    given = configured(longest_run_s=90, late_s=7, backlog=5, failed_runs=2, overdue=9, dropped=7)

    assert (given.longest_run, given.backlog, given.failed_runs, given.overdue) == (timedelta(seconds=90), 5, 2, 9)
    assert given.late == timedelta(seconds=7)
    assert given.most == {"dropped": 7, "doomed": drop_canceling.alerts.most["doomed"]}


def test_null_disables_an_alert() -> None:
    off = configured(longest_run_s=None, dropped=None)

    assert off.longest_run is None and "dropped" not in off.most


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"longest": 3},
            "there is no alarm longest; the alarms are longest_run_s, late_s, backlog, failed_runs, overdue, ",
        ),
        ({"backlog": 1.5}, "the alarm backlog is 1.5; it should be a whole number or null"),
    ],
)
def test_unknown_alert_is_rejected_with_the_known_ones(given: dict[str, float], said: str) -> None:
    with pytest.raises(SettingsError, match="alarms") as refused:
        sweep.configured(WorkerSettings(alarms=dict(given)))

    assert said in str(refused.value)
