"""Which alerts explain others, their order, and the sentence about them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from housekeeping import Delete, Rows, Sweep
from tests.declarations import changed
from tests.internals.database import ClockSkew
from tests.internals.insight import Alert
from tests.internals.ledger import Acknowledged
from tests.internals.web import ALERTS, Snapshot, database_server, explained, group_alerts

NOW: Final = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
MINUTE: Final = timedelta(minutes=1)


def sweep(name: str, **more: Any) -> Sweep:
    rows = Rows("sessions", stale=lambda row, now: row.expires_at <= now, action=Delete())
    return changed(Sweep(name, rows, schedule="*/5 * * * *"), **more)


SWEEPS: Final = {
    **{f"shop.w{number}": sweep(f"shop.w{number}") for number in range(60)},
    "mail.w": sweep("mail.w", actor={"queue_name": "mails"}),
}


def alert(name: str, worker: str = "", subject: str = "", minutes_ago: float = 5) -> Alert:
    return Alert(name, f"text of {name}", since=NOW - minutes_ago * MINUTE, worker=worker, subject=subject)


def causes(*alerts: Alert) -> dict[str, str]:
    """Return the cause of each alert, as ``worker/name``."""
    found = explained(alerts, SWEEPS, database_server)
    return {f"{each.worker}/{each.name}": "/".join(each.cause[:2]) if each.cause else "" for each in found}


def headline(*alerts: Alert) -> str:
    found = explained(alerts, SWEEPS, database_server)
    return Snapshot(NOW, alerts=found, clocks={"main": ClockSkew(NOW, timedelta())}).headline.as_text(NOW)


@pytest.mark.parametrize(
    ("run", "do"),
    [
        ("4711", "Look at the run: housekeeping runs 4711."),
        ("ci:7", "Look at the run: housekeeping runs ci:7."),
        (None, "Restart the process that the text names; another run takes over and resumes."),
    ],
)
def test_headline_names_the_run_to_look_at(run: str | None, do: str) -> None:
    assert headline(replace(alert("stuck", "shop.w1"), run=run)).endswith(do)


@pytest.mark.parametrize(
    ("alerts", "begin"),
    [
        ([alert("unseen", "shop.w1"), alert("unseen", "shop.w2")], "Unreadable rows: 2 workers, since "),
        ([alert("saturated", subject="a"), alert("saturated", subject="b")], "All threads busy: 2 times, since "),
    ],
)
def test_headline_counts_what_has_the_same_alert(alerts: list[Alert], begin: str) -> None:
    assert headline(*alerts).startswith(begin)


def test_headline_names_the_worker_to_ask_about() -> None:
    assert headline(alert("overdue", "shop.w1")).endswith("then: housekeeping why shop.w1.")


@pytest.mark.parametrize(
    ("cause", "caused"),
    [
        (
            alert("unavailable", subject="PostgreSQL, database main"),
            ["backlog", "failed_runs", "last_run", "late", "unseen"],
        ),
        (alert("unavailable", subject="Redis"), ["backlog", "failed_runs", "last_run", "late", "overdue", "stuck"]),
        (alert("no_space", subject="Redis"), ["backlog", "failed_runs", "last_run", "late", "overdue", "stuck"]),
        (
            alert("no_space", subject="PostgreSQL, database main"),
            ["backlog", "failed_runs", "last_run", "late", "overdue"],
        ),
        (alert("no_scheduler"), ["backlog", "late", "overdue"]),
        (replace(alert("clock", "shop.w1"), value=60.1), ["failed_runs", "last_run"]),
        (replace(alert("clock", "shop.w1"), value=60.0), []),
        (alert("no_worker", subject="cronjob"), ["backlog", "late", "overdue", "stuck"]),
        (alert("saturated", subject="cronjob"), ["backlog", "late", "overdue"]),
    ],
    ids=lambda each: f"{each.name} {each.subject}".strip() if isinstance(each, Alert) else "",
)
def test_cause_explains_only_what_follows_from_it(cause: Alert, caused: list[str]) -> None:
    others = [alert(name, "shop.w1", minutes_ago=4) for name in (*caused, "breaker")]
    if cause.subject.startswith("PostgreSQL"):
        others = others[:-1]  # the last state of its workers is not known to hold

    found = causes(*others, cause)

    explained_ones = sorted(
        key.removeprefix("shop.w1/") for key, root in found.items() if root == f"{cause.worker}/{cause.name}"
    )
    assert explained_ones == caused and found[f"{cause.worker}/{cause.name}"] == ""


def test_alert_of_another_queue_or_from_before_the_cause_stands_alone() -> None:
    found = causes(
        alert("overdue", "mail.w"), alert("overdue", "shop.w1", minutes_ago=60), alert("no_worker", subject="cronjob")
    )

    assert set(found.values()) == {""}


@pytest.mark.parametrize(("value", "cause"), [(None, "shop.w1/unseen"), (12.0, "")])
def test_unreadable_rows_explain_a_breaker_that_could_not_count(value: float | None, cause: str) -> None:
    found = causes(replace(alert("breaker", "shop.w1"), value=value), alert("unseen", "shop.w1"))

    assert found["shop.w1/breaker"] == cause


@pytest.mark.parametrize(("error", "cause"), [("text of unavailable", "/unavailable"), ("no column x", "")])
def test_redis_explains_rows_that_cannot_be_counted_because_of_it(error: str, cause: str) -> None:
    uncounted = replace(alert("unseen", "shop.w1"), text=f"the backlog cannot be counted: {error}")

    assert causes(uncounted, alert("unavailable", subject="Redis"))["shop.w1/unseen"] == cause


def test_stuck_run_explains_the_busy_threads_and_what_waits_for_them() -> None:
    waiting = [alert("overdue", f"shop.w{number}", minutes_ago=1) for number in range(2, 60)]

    found = causes(*waiting, alert("saturated", subject="cronjob", minutes_ago=3), alert("stuck", "shop.w1"))

    assert list(found.items())[0] == ("shop.w1/stuck", "")
    assert set(list(found.values())[1:]) == {"shop.w1/stuck"}


def test_dead_scheduler_is_one_group_and_one_sentence_for_sixty_workers() -> None:
    late = [alert("overdue", f"shop.w{number}") for number in range(60)]
    found = explained([*late, alert("failed_rows", "shop.w1"), alert("no_scheduler")], SWEEPS, database_server)

    groups = group_alerts(found)

    assert [(group.name, group.caused) for group in groups] == [("no_scheduler", "overdue (60)"), ("failed_rows", "")]
    assert headline(*found) == (
        "No scheduler, since 2026-11-20 11:55:00 UTC, 5 min ago. Start housekeeping scheduler "
        "(without Redis: housekeeping serve), or restart one that hangs. This explains 60 other alerts. "
        "Then look at 1 more alert."
    )


def test_acknowledged_causes_leave_the_sentence() -> None:
    known = replace(alert("stuck", "shop.w1"), acknowledged=Acknowledged("kim", NOW))

    assert headline(known).startswith("All right: 0 workers, 1 alert acknowledged")
    assert headline(known, alert("backlog", "shop.w2")).startswith("Large backlog: shop.w2, since ")


def test_graver_alerts_come_first_in_the_order_of_their_help() -> None:
    names = [name for name in ALERTS if name != "most_…"]
    alone = explained([alert(name, subject=name) for name in reversed(names)], {}, str)

    severities = [each.severity for each in alone if each.cause is None]
    assert severities == sorted(severities)
    critical = [each.name for each in alone if each.severity == "critical" and each.cause is None]
    assert critical == [name for name in names if name in critical]


def test_snapshot_that_could_not_be_read_is_not_all_right() -> None:
    assert Snapshot(NOW, late_s=5).headline.as_text(NOW) == (
        "Unknown: the servers do not answer in time. The page reloads by itself and shows the state when they do. "
        "If it stays so: housekeeping doctor."
    )
